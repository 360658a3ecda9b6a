import numpy as np
import pytest
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.training import load_arrays, read_arrays
from tests.unit.training.models import ImageNet, start_arrays


def test_tied_tensors_travel_once_and_may_be_given_by_either_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(3, 3, bias=False)
            self.decoder = nn.Linear(3, 3, bias=False)
            self.decoder.weight = self.encoder.weight

    model = Tied()
    assert list(read_arrays(model)) == ["encoder.weight"]
    assert read_arrays(model, without=["decoder.weight"]) == {}
    load_arrays(model, {"decoder.weight": np.full((3, 3), 2.0)})
    assert model.encoder.weight.detach().flatten().tolist() == [2.0] * 9


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"extra": np.ones(1)}, "the model has no 'extra'"),
        ({"out.bias": np.ones(7)}, r"the model's 'out.bias' is \(3,\), expected \(7,\)"),
        ({"out.bias": None}, "there are no values for the model's 'out.bias'"),
    ],
)
def test_arrays_that_do_not_fit_the_model_are_told(change: dict[str, object], problem: str) -> None:
    arrays = {**start_arrays(0), **change}
    given = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(TrainingError, match=problem):
        load_arrays(ImageNet(), given)  # type: ignore[arg-type]
