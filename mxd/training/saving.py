"""What a run leaves in its folder: states, from which it resumes bit for bit, and at the end the trained layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxd.artifacts.checkpoint import save_layer
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.tensors import fit_tensors
from mxd.common.errors import MxdError
from mxd.common.files import atomic_file
from mxd.common.parsing import differences
from mxd.common.processes import Processes, placed_as, whole
from mxd.config import RunConfig, config_hash, dump_config
from mxd.data.activations import Cursor
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.training.metrics import Metrics
from mxd.training.phases import Phase
from mxd.training.source import AUTOCAST, BASE, excluded_ids_of, origin
from mxd.training.state import RUN_FILE, Info, State, new_run, run_of, save_state
from mxd.training.step import Trainee

BELOW = "layers below (SHA-256 of their tensors)"


@dataclass
class Saver:
    """Saves and restores a run."""

    config: RunConfig
    base: FrozenModel
    trainees: Sequence[Trainee]
    """The replacements that this process trains."""
    metrics: Metrics
    processes: Processes
    """All processes of the run."""
    group: Processes
    """Those that train the same replacements."""
    phase: Phase
    """What is trained; ``config`` is that of the whole run."""
    saved: int = 0
    """The step of the last saved state, or 0."""

    def __post_init__(self) -> None:
        below = {str(number): digest for number, digest in self.phase.below.items()}
        self.origin, self.run_id = origin(self.config, self.base) | ({BELOW: below} if below else {}), ""

    def begin(self, state: State | None) -> None:
        """Write the folder's run id and config; where they are there, cut off the metrics that will be written again.

        Args:
            state: the state that the run continues from; without one the phase starts over.
        """
        with self.processes.together():
            if self.processes.first:
                folder = self.config.folder
                self.run_id = (run_of(folder) if self.phase.begun else None) or new_run(folder)
                if not self.phase.begun:
                    with atomic_file(folder / "config.yaml") as file:
                        file.write_text(dump_config(self.config), encoding="utf-8")
                elif state is not None:
                    self.metrics.cut(state.info.metrics_bytes, state.info.step)
                else:  # killed before its first saved state
                    self.metrics.restart()
        self.run_id = self.processes.gather(self.run_id)[0]

    def restore(self, state: State, shard: bool) -> None:
        """Restore every replacement from a state.

        Args:
            state: a state of this run.
            shard: whether each replacement is divided among the processes of a group.

        Raises:
            MxdError: the state is of another run, or of this one with another config, text or base model.
        """
        info = state.info
        with self.processes.together():
            self._check_own(state)
        for trainee in self.trainees:
            if shard:
                trainee.shard()
            tensors = state.tensors(trainee.name)
            # A new optimizer has no moments, whose shapes are therefore taken from the state itself.
            expected = {
                k: tensors.get(k, v) if k.startswith("optimizer/") else v for k, v in tensors_of(trainee).items()
            }
            fit_tensors(expected, tensors, f"{state.folder}/{trainee.name}")
            restore_tensors(trainee, tensors)
            trainee.stats.tokens = info.counted[trainee.name]
            if not self.group.first:
                trainee.stats.clear()
        self.metrics.reported, self.saved = info.reported, info.step

    def save(self, step: int, cursor: Cursor) -> None:
        """Write the state after a step, unless that is saved already.

        Args:
            step: the last finished step.
            cursor: the position in the text after it.

        Raises:
            MxdError: a replacement diverged, or the disk is full; earlier states are untouched.
        """
        if step in (0, self.saved):
            return
        self.check_losses(step)
        metrics_bytes = self.metrics.settle()
        self.metrics.merge()
        info = Info(
            run_id=self.run_id,
            step=step,
            tokens=step * self.config.training.batch_tokens,
            origin=self.origin,
            cursor=cursor,
            counted=self.metrics.of_all({trainee.name: trainee.stats.tokens for trainee in self.trainees}),
            metrics_bytes=metrics_bytes,
            reported=self.metrics.reported,
        )
        parts = {trainee.name: tensors_of(trainee) for trainee in self.trainees}
        with self.processes.together():
            for name, tensors in parts.items():
                self._check_finite(name, tensors, step)
        keep = self.config.training.keep_states
        save_state(self.phase.states, parts if self.group.first else {}, info, self.processes, keep)
        self.saved = step

    def finish(self, step: int, cursor: Cursor) -> None:
        """Write every layer as it is now; arguments as for ``save``."""
        with self.processes.together():
            for trainee in self.trainees:
                layer = trained_layer(trainee)
                self._check_finite(trainee.name, layer.state_dict(), step)
                if self.group.first:
                    provenance = self.provenance(trainee, step, cursor)
                    metrics = {"training": self.metrics.reported.get(trainee.name, {})}
                    save_layer(self.config.folder / trainee.name, layer, provenance, metrics)

    def check_losses(self, step: int) -> None:
        """Refuse to train a replacement that diverged any further.

        Raises:
            MxdError: a loss since the last report is not finite.
        """
        with self.processes.together():
            for trainee in self.trainees:
                if not trainee.stats.sums["loss"].isfinite():
                    raise self._diverged(trainee.name, "its loss", step)

    def _check_finite(self, name: str, tensors: Mapping[str, Tensor], step: int) -> None:
        """Refuse to write tensors that hold a NaN or an infinity."""
        for key, tensor in tensors.items():
            extremes = torch.stack(torch.aminmax(tensor)) if tensor.is_floating_point() and tensor.numel() else None
            if extremes is not None and not extremes.isfinite().all():  # 30 times faster than testing each number
                raise self._diverged(name, key, step)

    def _diverged(self, name: str, what: str, step: int) -> MxdError:
        states = self.phase.states.relative_to(self.config.folder)
        good = (
            f"the last good state, {states}/step-{self.saved:09d}, stays" if self.saved else "there is no earlier state"
        )
        return MxdError(
            f"{name} diverged before step {step:,}: {what} is not finite. Nothing of that is saved; {good}. In a "
            "new run lower training.lr, set training.clip_norm or leave this one out."
        )

    def _check_own(self, state: State) -> None:
        """Refuse a state of another run, or of this run with another config, text or base model."""
        folder, run_id = self.config.folder, run_of(self.config.folder)
        if run_id != state.info.run_id:
            raise MxdError(
                f"{state.folder} is a state of another run: it is of {state.info.run_id}, and {folder / RUN_FILE} "
                + (f"names {run_id}. " if run_id else "is missing. ")
                + "Put back this run's own, or start anew under another name with --run NAME."
            )
        changed = differences(state.info.origin, self.origin)
        step, training = state.info.step, self.config.training
        if state.info.tokens != step * training.batch_tokens or step > training.steps:
            changed.append(f"step {step:,} of {training.steps:,} cannot be after {state.info.tokens:,} tokens")
        if changed:
            raise MxdError(
                f"{folder} cannot continue as it began: {'; '.join(changed)}. Put that back, or start anew under "
                "another name with --run NAME."
            )

    def provenance(self, trainee: Trainee, step: int, cursor: Cursor) -> Provenance:
        """Return what a layer replaces and how it was trained up to a step; arguments as for ``save``."""
        config, training = self.config, self.config.training
        return Provenance.of(
            self.base,
            trainee.number,
            base_fingerprint=self.origin[BASE],
            excluded_ids=tuple(excluded_ids_of(config, self.base)),
            data=config.data.model_dump() | {"autocast": self.origin[AUTOCAST]},
            text_hash=cursor.text,
            below=dict(self.phase.below),
            training=training.model_dump() | {"steps": training.steps, "settings": training.settings.model_dump()},
            tokens=step * training.batch_tokens,
            seed=config.seed,
            config_hash=config_hash(config),
        )


def tensors_of(trainee: Trainee) -> dict[str, Tensor]:
    """Return every tensor of a replacement's state by name, unsharded; all its processes call this together."""
    tensors = {f"layer/{k}": whole(v) for k, v in trainee.layer.state_dict().items()}
    tensors |= {f"optimizer/{k}": v for k, v in trainee.optimizer.state().items()}
    tensors |= {f"sum/{k}": v for k, v in trainee.stats.sums.items()}
    scales = torch.tensor(trainee.scales, dtype=torch.float64)
    return tensors | {"last_active": trainee.stats.last_active, "scales": scales}


def restore_tensors(trainee: Trainee, tensors: Mapping[str, Tensor]) -> None:
    """Put the tensors of a saved state back in place."""
    weights = {k.removeprefix("layer/"): v for k, v in tensors.items() if k.startswith("layer/")}
    trainee.layer.load_state_dict({k: placed_as(v, weights[k]) for k, v in trainee.layer.state_dict().items()})
    input_scale, output_scale = tensors["scales"].tolist()
    trainee.scale((input_scale, output_scale))
    trainee.optimizer.restore(
        {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k.startswith("optimizer/")}
    )
    for key, total in trainee.stats.sums.items():
        total.copy_(tensors[f"sum/{key}"])
    trainee.stats.last_active.copy_(tensors["last_active"])


def trained_layer(trainee: Trainee) -> ReplacementLayer:
    """Return a replacement's layer, unsharded; all its processes call this together."""
    if not trainee.sharded:
        return trainee.layer
    layer = trainee.layer.config.build()
    layer.load_state_dict({k: whole(v) for k, v in trainee.layer.state_dict().items()})
    return layer
