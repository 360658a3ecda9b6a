"""What the page of the paper's comparison says besides its numbers."""

from __future__ import annotations

from collections.abc import Mapping

INTRODUCTION = """\
# The paper's comparison

Written by `python -m benchmarks.paper page`; do not edit. FedMA with communication against FedAvg,
FedProx and ensembles, as in section 5 of the paper, at a size that two CPU cores can do: smaller
data, fewer clients, fewer rounds. It shows the order of the methods at this size, and not the
paper's numbers.

- A **round** is one exchange with the clients: one layer for FedMA, all layers for FedAvg and
  FedProx (its mu is the paper's best, 0.001). FedMA has a whole global model only after a pass over
  all layers, so that is where it is evaluated. **MB** are up and down together, all clients, with
  FedMA's assignments. For the same bytes FedMA has more rounds, so also more local training.
- **Independent**: every client begins with its own random weights, as in the paper; **shared**:
  all begin with the same ones.
- The partition, the initial weights and the order of the batches follow from the seed, and methods
  with the same seed have the same partition. Numbers are means over seeds, with the least and the
  greatest in brackets, thin lines in the plots. No error bars are claimed from so few seeds.
- Accuracies are in % of test data, by which no setting was chosen. What was chosen on validation
  data, and how, stands at the end.
- Local training is the paper's: SGD, momentum 0.9, weight decay 1e-4 (none for FedMA while earlier
  layers are frozen). Each round has the same number of local epochs for every method, the last
  layer's too unless said otherwise.
- Growth of the global model is limited to 1.25 (`--max-growth`), for fewer bytes; the local models
  keep their size.
- The **ensemble** is of clients that trained alone as long as in one pass; they are sent once
  (dashed in the plots).
"""

COMMANDS = """\
```sh
.venv/bin/python -m benchmarks.paper mnist mnist.npz --results r.json
.venv/bin/python -m benchmarks.paper shakespeare tinyshakespeare.txt --results r.json
.venv/bin/python -m benchmarks.paper cifar10 cifar10.npz --seeds 0 --results r.json
.venv/bin/python -m benchmarks.paper cifar10 cifar10.npz --seeds 1 --methods fedma --results r.json
.venv/bin/python -m benchmarks.paper mnist mnist.npz --on validation --parts main --methods fedma \\
    --seeds 0 --set max_growth=1.5 --results r.json         # try another setting
.venv/bin/python -m benchmarks.paper page --results r.json --docs docs  # nothing is run
```

Image files hold `x_train, y_train, x_test, y_test` (bytes); the text is one file of speeches,
`NAME:` before each. Interrupted runs go on where they were. `--quick` is a trial of a minute.
The results of this page are in `benchmarks/paper-results.json`.
"""

TITLES: Mapping[str, str] = {
    "mnist": "LeNet on MNIST",
    "shakespeare": "Character LSTM on Shakespeare",
    "cifar10": "VGG-9 of half width on CIFAR-10",
    "main": "FedMA against FedAvg, FedProx and ensembles",
    "initialisation": "PyTorch's own initialisation",
    "epochs": "Effect of local epochs",
}

REMARKS: Mapping[tuple[str, str], str] = {
    ("mnist", "main"): """\
4 clients share 5,000 images, 1,250 each in the mean, every class by Dir(0.5); 3 local epochs, rate
0.01, batches of 32. Weights begin as He's, biases at zero.

An average of nets whose units are not matched can leave a layer of ReLUs dead; FedAvg then stays at
guessing for rounds, and such a seed decides the mean. So the leads of all seeds and their median
stand beside it. Clients that can begin with shared weights have nothing to be matched: there,
FedAvg itself is the method to beat.
""",
    ("mnist", "initialisation"): """\
The same with the weights that PyTorch gives layers by itself, whose variance is a sixth of He's.
FedAvg's first rounds tell how much an average of unmatched nets loses: much with He's weights, less
with these, presumably because what is learnt outweighs the random part sooner. Where there is
little to lose, matching has little to win: after as many rounds FedMA is ahead in no seed, and
has its fewer bytes alone.
""",
    ("mnist", "epochs"): """\
One pass of FedMA against 4 rounds of FedAvg, He's weights, one seed. The paper finds that FedAvg
suffers from long local training (10 to 150 epochs) and FedMA gains from it. Here, up to 10, both
gain, and the longer clients train, the less FedMA is ahead.
""",
    ("shakespeare", "main"): """\
The 4 roles that say most, 25,000 characters of each at most, the last fifth of each for the test;
an embedding of 8, 256 hidden units, sequences of 80 characters, 5 local epochs, the paper's rate of
0.8, gradients cut to a norm of 5. A pass has three rounds: the embedding, the LSTM, the decoder.
Accuracy is that of the next character.

In every seed FedMA is behind FedAvg by rounds and ahead of it by bytes. In a pass its LSTM trains
in two of three rounds, FedAvg's in all. And hidden units are hard to match: by their inputs they
are compared by nine numbers per gate only. So what would help was tried on validation data, one
pass each (last table):

- Recurrent weights are sent in the same round, so hidden units are matched again around the first
  matching with these too. That was better in every seed than without (`refine 0`), and is what
  `fedmerge retrain` does (`--refine`); more than three times (`refine 10`) brings no more.
- `rotation`: embedding and input weights are a product, so clients turn both, without any change of
  their function, until embeddings are as much alike as can be. The server finds the turn by the
  embeddings of the first round, and sends it down (8 × 8 numbers, counted). Better in every seed,
  by little in one. It needs a plan that knows of the product, so it is not part of fedmerge.
- `signs`: hidden units get the signs in which they are most alike: one byte each, no gain.
- A global model that may grow to twice the size: better in every seed, for a third more bytes.
- The last layer trained three times as long: better in every seed, but so the clients of FedMA
  alone train longer.
- An embedding that is the same for all and that nobody trains (`keep`), so that a pass has two
  rounds: worse in every seed.
""",
    ("cifar10", "main"): """\
2 clients share 4,000 images by Dir(0.5); 3 local epochs, rate 0.01, without augmentation; the last
layer trains three times as long at a tenth of the rate, as in the paper. A pass has nine rounds. It
is small on purpose: all runs of a seed take less than 20 minutes of one core.

By rounds FedMA is level with FedAvg in one seed and ahead in the other; by bytes it is far ahead in
both. Two seeds that differ by that much say no more.
""",
}

ROW_NAMES: Mapping[str, str] = {
    "mean": "mean client",
    "best": "best client (chosen on the test data)",
    "average": "element-wise average, one shot",
    "match": "FedMA's matching, one shot",
    "ensemble": "ensemble (mean of logits)",
}

TRIALS = """\
## What was chosen on what

Trials on validation data, which are training data that no client has. Methods were not tuned one by
one: rates, batches and epochs are the same for all of them, and the paper's where it names them.
`attempts` and the other settings are given as `--set NAME=VALUE`.

- Growth up to 1.5, fedmerge's default, is better at round 4 on MNIST, no better at round 8, and
  costs more than a third of FedAvg's bytes; hence 1.25 on this page. It is weights that cost: the
  assignments, 8 bytes for each of a client's 570 units, are 0.1 % of FedMA's bytes.
- The last layer's rate and epochs that the paper has for VGG-9 (÷ 10, × 3) are not better for
  LeNet, so they are used for VGG-9 alone.
- He's weights became the main setting after they and PyTorch's had been tried: they are what the
  one-shot results are measured with, and with PyTorch's the bars on rounds are missed, as shown.
"""
