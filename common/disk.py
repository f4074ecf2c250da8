"""Whether a disk has room for what is to be written."""

import shutil
from pathlib import Path


def shortage(folder: Path, purpose: str, needed: int) -> str:
    """What to say when the disk that has `folder` has less than `needed` bytes free; else nothing."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    return f"{folder}: too little room {purpose}: {needed} bytes needed, {free} free"
