"""Where in which file memory that maps a file lies, as far as the system says."""

from dataclasses import dataclass
from pathlib import Path

_MAPS = Path("/proc/self/maps")  # Linux: "start-end mode offset device inode path" per line


@dataclass(frozen=True)
class FilePart:
    """Some bytes of a file."""

    path: Path
    offset: int


def mapped_part(address: int, size: int) -> FilePart | None:
    """Return the file and place whose bytes are mapped at an address, None if there is none."""
    try:
        lines = _MAPS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:  # another system
        return None
    for line in lines:
        bounds, _, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address and address + size <= end:
            place = int(offset, 16) + address - start
            return FilePart(Path(path[0]), place) if path and _is(path[0], int(inode)) else None
    return None


def _is(path: str, inode: int) -> bool:
    """Return whether a path still leads to the file that was mapped."""
    try:
        return inode != 0 and Path(path).stat().st_ino == inode
    except OSError:
        return False
