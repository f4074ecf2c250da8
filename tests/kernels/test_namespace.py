"""Our top-level `kernels` must not pass for Hugging Face's package of that name."""

from pathlib import Path

import transformers
from transformers.utils import is_kernels_available

import kernels
from tests.oracle import oracle_logits, tiny_model


def test_transformers_does_not_take_our_kernels_for_hugging_faces(tmp_path: Path) -> None:
    assert Path(kernels.__file__).parent == Path(__file__).parents[2] / "kernels"
    assert not hasattr(kernels, "__version__")
    assert not is_kernels_available()

    tiny_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert oracle_logits(model, [1, 2, 3]).isfinite().all()
