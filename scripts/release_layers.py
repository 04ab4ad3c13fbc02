"""Train, measure and pack the layers that are attached to a release: `make release-layers`."""

import argparse
import tarfile
from pathlib import Path

from mxd.artifacts.folders import LAYER_FILES, SET_FILES, layers_in
from mxd.artifacts.transfer import write_cards
from mxd.common.files import atomic_file
from mxd.config import load_config
from mxd.evaluation.checkpoints import open_checkpoints, save_results
from mxd.evaluation.faithfulness import answer
from mxd.questions import FaithfulnessConfig
from mxd.training.trainer import train

CONFIG = Path(__file__).parents[1] / "configs" / "release.yaml"
LICENSE = "apache-2.0"


def pack(folder: Path, archive: Path) -> None:
    """Write what ``mxd push`` would send of a run into an archive, in a folder of the run's name."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = [layer / name for layer in layers_in(folder, "*", str(folder)) for name in LAYER_FILES]
    with atomic_file(archive) as partial, tarfile.open(partial, "w:gz") as tar:
        for file in [*files, *(folder / name for name in SET_FILES)]:
            if file.is_file():
                tar.add(file, Path(folder.name) / file.relative_to(folder))


def main() -> None:
    """Train what is not trained yet, measure it, write the cards, and pack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    asked, overrides = parser.parse_known_args()
    config = load_config(CONFIG, overrides)
    folder = train(config, resume=config.folder.exists())
    results = answer(open_checkpoints([folder], device=config.model.device), FaithfulnessConfig(tokens=32768))
    save_results(results, folder / "faithfulness.json")
    write_cards(folder, LICENSE)
    archive = asked.out / f"{config.run}.tar.gz"
    pack(folder, archive)
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
