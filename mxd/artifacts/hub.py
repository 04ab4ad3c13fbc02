"""Transport to and from the Hugging Face Hub: references, downloads, uploads, and failures in one line.

org/name[/subfolder][@revision]      hf://org/name... where there is a local folder of that name

Nothing here knows what the files mean.
"""

import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha1, sha256
from pathlib import Path

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    HfApi,
    constants,
    get_token,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from mxd.common.errors import MxdError
from mxd.common.network import asking_hub

Cards = Callable[[str | None], Mapping[str, str]]
"""Builds the README files of an upload (path in the repository -> text), given the commit to point to, if known."""

_FORM = re.compile(r"(?P<repo>[^/@]+/[^/@]+)(?:/(?P<subfolder>[^@]+))?(?:@(?P<revision>.+))?")
_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIN = re.compile(r"@([0-9a-f]{40})\b")
_TOKEN = re.compile(r"\bhf_\w{4,}")


@dataclass(frozen=True)
class HubReference:
    """A repository on the Hub, or a folder in it, at a revision (``None``: its main branch)."""

    repo: str
    subfolder: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubReference":
        """Read ``[hf://]org/name[/subfolder][@revision]``.

        Raises:
            MxdError: it has another form, or a part that could lead outside the repository.
        """
        match = _FORM.fullmatch(text.removeprefix("hf://"))
        wrong = MxdError(f"{text!r} is not a Hub reference; expected org/name[/subfolder][@revision].")
        if match is None:
            raise wrong
        reference = cls(match["repo"], match["subfolder"] or "", match["revision"])
        parts = [part for part in (reference.subfolder, reference.revision) if part]
        if not all(is_name(name) for part in parts for name in part.split("/")):
            raise wrong
        try:
            validate_repo_id(reference.repo)
        except HFValidationError:
            raise wrong from None
        return reference

    @property
    def name(self) -> str:
        """The last part of its path."""
        return f"{self.repo}/{self.subfolder}".rstrip("/").rpartition("/")[2]

    def __str__(self) -> str:
        path = f"{self.repo}/{self.subfolder}".rstrip("/")
        return f"{path}@{self.revision}" if self.revision else path


@dataclass(frozen=True)
class Remote:
    """A repository before an upload."""

    files: frozenset[str]
    """Paths in it."""
    readme: str
    """Its card, or ""."""


@dataclass(frozen=True)
class Pushed:
    """The result of an upload."""

    url: str
    """The repository's page, or the pull request's."""
    revision: str
    """The first commit with these files, which a card or a paper should cite."""


def is_name(text: str) -> bool:
    """Return whether a folder may have this name: no path, no characters special to a shell, none invisible."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def reference_of(source: str | Path, revision: str | None = None) -> HubReference | None:
    """Return the Hub reference that a source is, or ``None`` for a local path; a local path that exists always wins.

    A ``Path`` is local, and so is ``a/b`` if there is a folder ``a``, so that a mistyped path never reaches the Hub.

    Raises:
        MxdError: two revisions are given, or one for a local path.
    """
    if isinstance(source, Path) or _is_local(source):
        if revision is not None:
            raise MxdError(f"{str(source)!r} is a local path, which has no revision {revision!r}; leave it out.")
        return None
    reference = HubReference.parse(source)
    if revision is None or revision == reference.revision:
        return reference
    if reference.revision is not None:
        raise MxdError(f"two revisions are given: {str(reference)!r} and {revision!r}; leave one out.")
    return HubReference.parse(f"{reference}@{revision}")


def _is_local(source: str) -> bool:
    if source.startswith("hf://"):
        return False
    first = source.partition("/")[0]
    if not (_FORM.fullmatch(source) and _NAME.fullmatch(first)):
        return True
    try:
        return Path(source).exists() or Path(first).is_dir()
    except OSError:  # the name is too long
        return True


def cached_reference(path: Path) -> HubReference | None:
    """Return the reference, with its commit, of a folder in the Hub's local cache; ``None`` for any other folder."""
    parts = path.absolute().parts
    for i, part in enumerate(parts):
        if (
            part == "snapshots"
            and i
            and parts[i - 1].startswith("models--")
            and _COMMIT.fullmatch("".join(parts[i + 1 : i + 2]))
        ):
            repo = parts[i - 1].removeprefix("models--").replace("--", "/")
            return HubReference(repo, "/".join(parts[i + 2 :]), parts[i + 1])
    return None


def download(
    reference: HubReference,
    files: Sequence[str],
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download files of a reference into the Hub's local cache and return the reference's folder there.

    Every file is complete or absent; the folder's path names the commit.

    Args:
        reference: what to download.
        files: patterns of paths below the reference; those that match nothing are skipped.
        token: access token; by default the one of ``hf auth login`` or ``HF_TOKEN``.
        cache_dir: the cache, if not the usual one.
        local_files_only: never ask the Hub; files missing from the cache are an error.

    Raises:
        MxdError: anything went wrong; the message says what, and what to do.
    """
    prefix = f"{reference.subfolder}/" if reference.subfolder else ""
    with _failures(reference, token, "download"):
        root = snapshot_download(
            reference.repo,
            revision=reference.revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=[prefix + file for file in files],
        )
    return Path(root, reference.subfolder)


def prepare(repo: str, private: bool = False, revision: str | None = None, token: str | bool | None = None) -> Remote:
    """Create a repository and a branch if necessary, and return what they hold.

    Args:
        repo: ``org/name``.
        private: create it as private; an error if it exists and is public.
        revision: the branch; by default main.
        token: access token; by default the one of ``hf auth login`` or ``HF_TOKEN``.

    Raises:
        MxdError: they cannot be created, or a public repository should be private.
    """
    target = HubReference.parse(repo)
    if target.subfolder or target.revision:
        raise MxdError(f"{repo!r} is not a repository: expected org/name (a branch goes into revision).")
    api = HfApi(token=token)
    with _failures(replace(target, revision=revision), token, "upload"):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        info = api.model_info(repo, revision=revision)
        if private and not info.private:
            raise MxdError(
                f"{repo} exists already and is public, so nothing was sent; make it private in its settings on the "
                "Hub, or leave --private out."
            )
        files = frozenset(file.rfilename for file in info.siblings or ())
        readme = ""
        if "README.md" in files:
            readme = Path(hf_hub_download(repo, "README.md", revision=info.sha, token=token)).read_text("utf-8")
    return Remote(files, readme)


def push(
    repo: str,
    files: Mapping[str, Path],
    cards: Cards,
    remote: Remote,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    message: str = "Upload with mxd",
) -> Pushed:
    """Upload files and their cards in one commit; pushing the same again changes nothing.

    The cards then get a second commit, in which they name the first.

    Args:
        repo: ``org/name``, prepared.
        files: path in the repository -> local file.
        cards: builds the README files.
        remote: what ``prepare`` returned.
        revision: branch to push to.
        create_pr: open a pull request to main instead.
        token: access token; by default the one of ``hf auth login`` or ``HF_TOKEN``.
        message: the commit's message.

    Raises:
        MxdError: anything went wrong; the message says what, and what to do. A layer is then complete or unchanged.
    """
    api = HfApi(token=token)

    def commit(
        paths: Mapping[str, Path], texts: Mapping[str, str], revision: str | None, create_pr: bool
    ) -> CommitInfo:
        content: dict[str, Path | bytes] = {**paths, **{path: text.encode() for path, text in texts.items()}}
        operations = [CommitOperationAdd(path, value) for path, value in content.items()]
        return api.create_commit(repo, operations, commit_message=message, revision=revision, create_pr=create_pr)

    with _failures(HubReference(repo, revision=revision), token, "upload"):
        pin = _pin(api, repo, remote.readme, files)
        done = commit(files, cards(pin), revision, create_pr)
        url = done.pr_url
        if pin is None:
            pin = done.oid
            done = commit({}, cards(pin), done.pr_revision or revision, create_pr and url is None)
    return Pushed(url or done.pr_url or f"{api.endpoint}/{repo}", pin)


def _pin(api: HfApi, repo: str, readme: str, files: Mapping[str, Path]) -> str | None:
    """Return the commit that the card of an earlier push names, if it holds these very files."""
    named = _PIN.search(readme)
    if named is None:
        return None
    paths, stored = list(files), []
    try:
        for start in range(0, len(paths), 500):  # the Hub's limit per request
            stored += api.get_paths_info(repo, paths[start : start + 500], revision=named[1])
    except RevisionNotFoundError:
        return None
    hashes = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in stored if isinstance(file, RepoFile)}
    same = all(hashes.get(path) in _hashes(file) for path, file in files.items())
    return named[1] if same else None


def _hashes(file: Path) -> tuple[str, str]:
    """Return the names that the Hub gives to a file's content: as a git blob, and in large file storage."""
    content = file.read_bytes()
    return sha1(b"blob %d\0" % len(content) + content).hexdigest(), sha256(content).hexdigest()


@contextmanager
def _failures(reference: HubReference, token: str | bool | None, doing: str) -> Iterator[None]:
    """Turn errors of the Hub's client into one line with a remedy.

    The original error is left out of the traceback: it may quote headers, and with them the token.
    """
    try:
        with asking_hub():
            yield
    except (HTTPError, OSError, ValueError, RuntimeError, EntryNotFoundError) as error:
        message = _explain(_causes(error), reference, doing)
        secrets = [secret for secret in (token, get_token()) if isinstance(secret, str) and secret]
        for secret in secrets:
            message = message.replace(secret, "<token>").replace(repr(secret)[1:-1], "<token>")
        raise MxdError(_TOKEN.sub("<token>", message)) from None


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and its chain of causes: the client wraps the informative one."""
    errors = [error]
    while (cause := errors[-1].__cause__) is not None:
        errors.append(cause)
    return errors


LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
AGAIN = {
    "upload": "Run the same command again: what arrived is not sent twice, and no incomplete upload is visible.",
    "download": "Run the same command again: complete files are kept, and no incomplete file is ever loaded.",
}


def _explain(errors: Sequence[BaseException], reference: HubReference, doing: str) -> str:
    """Return one line for a failure, from the most informative of its errors."""
    repo, endpoint = reference.repo, constants.ENDPOINT

    def of(*kinds: type[BaseException]) -> BaseException | None:
        return next((error for error in errors if isinstance(error, kinds)), None)

    full = next((e for e in errors if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)), None)
    if full is not None:
        return f"the disk is full ({full.strerror}): free space, or move the cache with HF_HOME. {AGAIN[doing]}"
    if of(GatedRepoError):
        return f"{repo} is gated: ask for access at {endpoint}/{repo}, then {LOGIN}."
    if of(RepositoryNotFoundError):
        return (
            f"no repository {repo} on the Hub ({endpoint}), and nothing of that name here; or it is private, or the "
            f"token is not accepted. Check the name, and {LOGIN}."
        )
    if of(RevisionNotFoundError):
        return f"{repo} has no revision {reference.revision!r}; give a branch, a tag or a commit of it."
    if (refused := of(HfHubHTTPError)) is not None:
        return _explain_status(refused, reference, doing)
    here = f"there is no folder {replace(reference, revision=None)} here, " if doing == "download" else ""
    also = "and " if here else ""
    if of(OfflineModeIsEnabled) and not constants.HF_HUB_OFFLINE:
        return f"{here}{also}the Hub ({endpoint}) cannot be reached. Check the network. {AGAIN[doing]}"
    if of(OfflineModeIsEnabled):
        return (
            f"{here}offline mode is on (HF_HUB_OFFLINE), and {reference} is not complete in the local cache. "
            "Unset HF_HUB_OFFLINE, or use a local folder."
        )
    if (lost := of(HTTPError)) is not None:
        return f"{here}{also}the connection to {endpoint} failed ({_line(lost)}). Check the network. {AGAIN[doing]}"
    if of(LocalEntryNotFoundError):
        return f"{reference} is not complete in the local cache. Leave local_files_only out to download it."
    return f"{doing} of {reference} failed: {_line(errors[-1])}. {AGAIN[doing]}"


def _explain_status(error: BaseException, reference: HubReference, doing: str) -> str:
    """Return one line for a refusal by the Hub."""
    assert isinstance(error, HfHubHTTPError)
    status, reason = error.response.status_code, error.server_message or ""
    reason = f" ({' '.join(reason.split())})" if reason else ""
    if status == 401:
        return f"the Hub wants a valid token{reason}: {LOGIN}."
    if status == 403:
        need = "a token with write access to" if doing == "upload" else "a token that may read"
        return f"the Hub refuses access to {reference.repo}{reason}: you need {need} it; {LOGIN}."
    if status == 404:
        return f"{reference} has no such file on the Hub{reason}; check the name."
    if status == 429:
        return f"the Hub asks to wait: too many requests{reason}. {AGAIN[doing]}"
    if status >= 500:
        return f"the Hub has trouble (HTTP {status}){reason}. Try later. {AGAIN[doing]}"
    return f"the Hub refuses the {doing} of {reference} (HTTP {status}){reason}."


def _line(error: BaseException) -> str:
    """Return an error's text in one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
