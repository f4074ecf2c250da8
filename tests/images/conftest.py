"""What tests of the images share with those that drive real processes."""

from tests.e2e.conftest import tiny_model_folder as tiny_model_folder
