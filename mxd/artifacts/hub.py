"""The Hugging Face Hub as a place for folders: names of what lies there, files down, files up, failures in one line.

org/name[/subfolder][@revision]      hf://org/name... where a local folder of that name is in the way

Only transport: what the files mean is known higher up.
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

Cards = Callable[[str | None], Mapping[str, str]]
"""Builds the README files of an upload: commit that they point to, where known -> path in the repository -> text."""

_FORM = re.compile(r"(?P<repo>[^/@]+/[^/@]+)(?:/(?P<subfolder>[^@]+))?(?:@(?P<revision>.+))?")
_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIN = re.compile(r"@([0-9a-f]{40})\b")
_TOKEN = re.compile(r"\bhf_\w{4,}")


@dataclass(frozen=True)
class HubReference:
    """What lies in a repository on the Hub, or in a folder of it, at a revision (``None``: its main branch)."""

    repo: str
    subfolder: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubReference":
        """Read ``[hf://]org/name[/subfolder][@revision]``.

        Raises:
            MxdError: it has another form, or a part that could lead out of the repository.
        """
        match = _FORM.fullmatch(text.removeprefix("hf://"))
        wrong = MxdError(f"{text!r} is not a Hub reference; expected org/name[/subfolder][@revision].")
        if match is None:
            raise wrong
        found = cls(match["repo"], match["subfolder"] or "", match["revision"])
        parts = [part for part in (found.subfolder, found.revision) if part]
        if not all(is_name(name) for part in parts for name in part.split("/")):
            raise wrong
        try:
            validate_repo_id(found.repo)
        except HFValidationError:
            raise wrong from None
        return found

    @property
    def name(self) -> str:
        """The last part of its path."""
        return f"{self.repo}/{self.subfolder}".rstrip("/").rpartition("/")[2]

    def __str__(self) -> str:
        path = f"{self.repo}/{self.subfolder}".rstrip("/")
        return f"{path}@{self.revision}" if self.revision else path


@dataclass(frozen=True)
class Remote:
    """A repository as it is before an upload."""

    files: frozenset[str]
    """Paths in it."""
    readme: str
    """Its card, or nothing."""


@dataclass(frozen=True)
class Pushed:
    """What an upload led to."""

    url: str
    """Where people see it: the repository, or the pull request."""
    revision: str
    """The commit that first held these files: what a card or a paper should point to."""


def is_name(text: str) -> bool:
    """Whether a folder may be called so: nothing that leads elsewhere, that a shell obeys, or that no person sees."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def reference_of(source: str | Path, revision: str | None = None) -> HubReference | None:
    """Tell Hub references from local paths, for which ``None`` is returned; a local path that exists always wins.

    A ``Path`` is local, and so is ``a/b`` where a folder ``a`` is here, so that a mistyped path asks nobody.

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
    except OSError:  # longer than a name can be
        return True


def cached_reference(path: Path) -> HubReference | None:
    """Return what a folder in the Hub's local cache is a copy of, with its commit; ``None`` for any other folder."""
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
    """Bring files of a reference into the Hub's local cache and return the folder that stands for the reference.

    Every file is complete or absent; the folder's path names the commit.

    Args:
        reference: what to bring.
        files: patterns of paths below the reference; those that match nothing are left out.
        token: access token; by default the one of ``hf auth login`` or ``HF_TOKEN``.
        cache_dir: the cache, where not the usual one.
        local_files_only: ask nobody; what is not in the cache is an error.

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
    """Make sure that a repository and a branch are there, and return what they hold.

    Raises:
        MxdError: they cannot be made, or ``private`` is asked of a repository that is public.
    """
    target = HubReference.parse(repo)
    if target.subfolder or target.revision:
        raise MxdError(f"{repo!r} is no repository: expected org/name (a branch goes into revision).")
    api = HfApi(token=token)
    with _failures(replace(target, revision=revision), token, "upload"):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        info = api.model_info(repo, revision=revision)
        if private and not info.private:
            raise MxdError(
                f"{repo} is there already and public, so nothing was sent; make it private in its settings on the Hub, "
                "or leave --private out."
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
    """Send files and their cards; all of them appear in one commit, and pushing the same again changes nothing.

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
        MxdError: anything went wrong; the message says what, and what to do. A layer is there whole then, or as before.
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
    paths, there = list(files), []
    try:
        for start in range(0, len(paths), 500):  # the Hub takes no more at once
            there += api.get_paths_info(repo, paths[start : start + 500], revision=named[1])
    except RevisionNotFoundError:
        return None
    hashes = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in there if isinstance(file, RepoFile)}
    same = all(hashes.get(path) in _hashes(file) for path, file in files.items())
    return named[1] if same else None


def _hashes(file: Path) -> tuple[str, str]:
    """Return the names that the Hub gives to a file's content: as a git blob, and in large file storage."""
    content = file.read_bytes()
    return sha1(b"blob %d\0" % len(content) + content).hexdigest(), sha256(content).hexdigest()


@contextmanager
def _failures(reference: HubReference, token: str | bool | None, doing: str) -> Iterator[None]:
    """Turn whatever the Hub's client raises into one line with its remedy.

    The original is left out of the traceback: it may quote headers, and with them the token.
    """
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError, EntryNotFoundError) as error:
        message = _explain(_causes(error), reference, doing)
        secrets = [secret for secret in (token, get_token()) if isinstance(secret, str) and secret]
        for secret in secrets:
            message = message.replace(secret, "<token>").replace(repr(secret)[1:-1], "<token>")
        raise MxdError(_TOKEN.sub("<token>", message)) from None


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and what it was raised from: the client wraps the telling one."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
AGAIN = {
    "upload": "Run the same again: what was sent already is not sent twice, and nothing half-sent is visible.",
    "download": "Run the same again: complete files are kept, and no half file is ever loaded.",
}


def _explain(errors: Sequence[BaseException], reference: HubReference, doing: str) -> str:
    """Return one line for a failure, from the most telling of its errors."""
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
    if of(OfflineModeIsEnabled):
        return (
            f"offline mode is on (HF_HUB_OFFLINE), and {reference} is not complete in the local cache. "
            "Unset HF_HUB_OFFLINE, or use a local folder."
        )
    if (lost := of(HTTPError)) is not None:
        return f"the connection to {endpoint} failed ({_line(lost)}). Check the network. {AGAIN[doing]}"
    if of(LocalEntryNotFoundError):
        return f"{reference} is not complete in the local cache. Leave local_files_only out to download it."
    return f"{doing} of {reference} failed: {_line(errors[-1])}. {AGAIN[doing]}"


def _explain_status(error: BaseException, reference: HubReference, doing: str) -> str:
    """Return one line for an answer of the Hub that refuses."""
    assert isinstance(error, HfHubHTTPError)
    status, said = error.response.status_code, error.server_message or ""
    said = f" ({' '.join(said.split())})" if said else ""
    if status == 401:
        return f"the Hub wants a valid token{said}: {LOGIN}."
    if status == 403:
        need = "a token with write access to" if doing == "upload" else "a token that may read"
        return f"the Hub refuses access to {reference.repo}{said}: it takes {need} it; {LOGIN}."
    if status == 404:
        return f"{reference} has no such file on the Hub{said}; check the name."
    if status == 429:
        return f"the Hub asks to wait: too many requests{said}. {AGAIN[doing]}"
    if status >= 500:
        return f"the Hub has trouble (HTTP {status}){said}. Try later. {AGAIN[doing]}"
    return f"the Hub refuses the {doing} of {reference} (HTTP {status}){said}."


def _line(error: BaseException) -> str:
    """Return an error's text in one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
