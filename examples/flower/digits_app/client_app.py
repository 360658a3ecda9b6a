"""What a site does: fedmerge's tasks, and Flower's usual training beside them."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor
from torch.nn import functional

from digits_app.task import Net, site_data
from fedmerge.flower import client_app

BATCH, RATE = 32, 0.05


def load_data(context: Context) -> tuple[Tensor, Tensor]:
    """Return this node's data."""
    return site_data(int(context.node_config["partition-id"]), int(context.run_config["sites"]))


app = client_app(load_data, Net)  # all that FedMA needs


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as any ClientApp does: what FedAvg and MatchedAveraging ask for."""
    torch.manual_seed(int(message.content["config"]["server-round"]))
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_data(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(int(context.run_config["epochs"])):
        for rows in torch.randperm(len(labels)).split(BATCH):
            loss = functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(labels), "loss": loss.item()})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
