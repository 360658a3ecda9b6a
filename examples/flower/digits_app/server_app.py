"""What the server does: one of three strategies."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedmerge
from digits_app.task import Net, test_data
from fedmerge.flower import FedMA, MatchedAveraging

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy of the run configuration, and say how good its model is."""
    given = context.run_config
    if given["strategy"] == "fedma":
        strategy = FedMA(
            Net,
            min_available_nodes=int(given["sites"]),
            epochs=int(given["epochs"]),
            passes=int(given["passes"]),
            output=given["output"] or None,
        )
        model = fedmerge.load_model(Net, strategy.start(grid))
    else:
        averaging = MatchedAveraging if given["strategy"] == "matched" else FedAvg
        nodes = int(given["sites"])
        torch.manual_seed(0)
        result = averaging(fraction_evaluate=0.0, min_train_nodes=nodes).start(
            grid, ArrayRecord(Net().state_dict()), num_rounds=int(given["rounds"])
        )
        model = Net()
        model.load_state_dict(result.arrays.to_torch_state_dict())
    print(f"{given['strategy']}: {accuracy(model):.1%} of images that no site has")


def accuracy(model: nn.Module) -> float:
    """Return the share of test images that a model knows."""
    images, labels = test_data()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()
