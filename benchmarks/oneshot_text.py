"""What the page of one-shot merges says besides its tables."""

from __future__ import annotations

from collections.abc import Mapping

INTRODUCTION = """\
# One-shot merges

How good is a merge without any retraining? Written by `benchmarks/oneshot.py`, which compares
fedmerge's merges with what they are made of, and with simpler ways to merge:

- **clients**, the **element-wise average** of their weights, and their **ensemble** (the mean of
  their outputs, as large as all of them together);
- the **paper's preset** (`--preset paper`): weights alone are matched, and the model may grow
  without limit;
- **files alone**: fedmerge's defaults without `--model`, within the same growth as ours; with
  `--refine 0` no group is matched a second time;
- **activation matching alone** (`--signature activations --lead none --merge-units mean`): units
  are matched by their responses to the 1,000 inputs, or to generated text, and averaged, at our
  size;
- **ours**: fedmerge's defaults, given `--model` and the largest growth. *No data* is what is made
  from the clients alone: synthetic inputs and noise, or text that they generate. *1,000 inputs* are
  `--probe-data` without labels, of training data;
- **distilled**: the same with `--distill`.

Accuracies are in % of test data, which no choice was made on: fedmerge sees the probes alone.
Numbers are means over seeds with the least and the greatest in brackets; one number alone is of one
seed, or the same for all. A seed stands for other probes of the same checkpoints, and for other
clients where they are trained here. Merges are tested as users have them: written to a file, and
loaded into the model's code. Seconds are of wall time on one thread, with other work beside it.

Run before fitted hidden units got [their targets' variance](#what-is-missed-and-why): the character
LSTM, which has no such units.
"""

COMMANDS = """\
```sh
.venv/bin/python -m benchmarks.oneshot --data DIR --checkpoints DIR --work clients --results r.json
.venv/bin/python -m benchmarks.oneshot --data DIR --checkpoints DIR --results r.json \\
    --cases mlp_784_50_10 cifar_net --methods ours --seeds 0 1 2 3 4    # a part of it
.venv/bin/python -m benchmarks.oneshot page --results r.json --docs docs  # nothing is run
```

The folder of data has `mnist.npz`, `cifar10*.npz` (`x_train, y_train, x_test, y_test`, in bytes)
and `tinyshakespeare.txt`, that of checkpoints files such as `cifar_net-1.pt`. Interrupted runs go
on where they were. The results of this page are in `benchmarks/oneshot-results.json`.
"""

TITLES: Mapping[str, str] = {
    "families": "Strangers' checkpoints",
    "lenet": "LeNet on MNIST",
    "lstm": "Character LSTM on Shakespeare",
    "vgg": "VGG-9 of half width on CIFAR-10",
    "lenet-others": "LeNet on MNIST: other clients, splits and initial weights",
    "shared": "Clients that share their initial weights",
    "choices": "Choices behind the defaults",
}

REMARKS: Mapping[str, str] = {
    "families": """\
Two to four public checkpoints each, trained by people who did not know of each other; growth up to
2. Tests are all 10,000 images of MNIST, 5,000 of CIFAR-10, and the last 60,000 characters of
tinyshakespeare in sequences of 100, each from a state of zeros.
""",
    "lenet": """\
2,500 images per client in the mean, every class by Dir(0.5), He's initial weights, every client
alone for 10 epochs at a rate of 0.01; growth up to 1.5. The 1,000 inputs are images that no client
has. The bars come from clients of 82.6 % in the mean, 93.8 % at best, and 95.9 % as an ensemble;
the number of images was chosen so that clients here are about as good, before anything was merged.
A first draft had half the images, with worse clients and results.
""",
    "lstm": """\
The 4 roles that say most, as in [the paper's comparison](paper.md), each alone for 15 epochs;
growth up to 1.5. Accuracy is that of the next character; probes are text that the clients generate.
""",
    "vgg": """\
2 clients share 16,000 images, every class by Dir(0.5) or in equal parts, He's initial weights, each
alone for 8 epochs at a rate of 0.01 without augmentation; growth up to 1.5. The bars do not say
how images are shared. They come from clients of 57 % in the mean, 61 % at best, and 61.8 % as an
ensemble; those of equal parts are about as good, those of Dir(0.5) are not.
""",
    "lenet-others": """\
As above, for other numbers of clients, for clients with the same share of every class, and for
PyTorch's own initial weights.
""",
    "shared": """\
Every client begins with the same weights, so that units mean the same at the same places and the
element-wise average is no bad merge already: a match must not make it worse, and none here does.
Averages that work are [kept](explanation.md#what-clients-do-probes), though the CNN with batch norm
and the CIFAR net would gain a little by fits: on digits such fits fell far below the average. The
LeNets' averages do not work, and are given up. Growth up to 1.5.
""",
    "choices": """\
What other options than the defaults give, one choice at a time: 3 seeds of clients of their own,
trained on parts of the training data and judged on training data that no client has. No test data
and no strangers' checkpoints are in here: choices may be made by this table. Growth up to 1.5;
1,000 inputs without labels, or text that the clients generate. The CIFAR net has 3 clients of 3,000
images with the same share of every class, the CNN with batch norm 3 of 2,000 by Dir(0.5), the LSTM
over the rows of digits 3 of 4,000, the character LSTM (96 units) 3 roles. "Files alone" are merges
without `--model`, that is without probes. Means over seeds, with the least and the greatest.
""",
}

FORESIGHT = """\
## How well agreement predicts a merge

fedmerge chooses among ways to merge (the element-wise average; all clients equal or one leading;
units averaged or fitted; distilled ones) by how often they decide as the ensemble does on probes
that were held out. Of seed 0 all were tested here, which fedmerge cannot do. Two candidates count
as a pair where their accuracies differ by a point or more. Models whose outputs are compared in
bits are left out, and clients that share their initial weights, whose averages are kept.
"""

FOREWARNED = """\
fedmerge warns where a merge is, or [may be](explanation.md#what-clients-do-probes), worse than a
client. That is compared here with the truth: whether the merge is worse on test data than the best
client, by however little, which nobody knows without labels. These are all merges of ours, without
`--distill`. How loudly to warn was settled on development clients before these runs, but with a
look at an earlier page of the strangers' checkpoints.
"""

MISSED = """\
## What is missed, and why

**`cifar_net` with 1,000 inputs**: 55.7 % against 56. The merges that are chosen agree with the
ensemble most, and are not the most accurate: with one client leading, the same matching meets the
bar, which only labels tell. More inputs to fit to, unless they are real, help little if at all; on
development clients, by `python -m benchmarks.oneshot_trials --data DIR --work clients` (accuracy in
% of training data that no client has, means over 3 seeds with the least and the greatest):

| fitted to | the inputs | mixtures of two, too | synthetic ones and noise, too |
| --- | --- | --- | --- |
| CIFAR net | 43.8 (43.6 to 44.0) | 43.7 (43.5 to 44.0) | 43.5 (43.4 to 43.6) |
| CNN with batch norm | 91.2 (90.5 to 92.6) | 91.4 (90.5 to 92.9) | 91.2 (90.4 to 92.6) |
| LSTM over rows | 94.0 (93.9 to 94.3) | 93.9 (93.7 to 94.1) | 93.8 (93.7 to 93.9) |
| seconds | 8, 13, 20 | 18, 28, 33 | 23, 40, 44 |

Earlier trials, by scripts that are not kept, had the CIFAR net gain 0.3 and 0.4 points by mixtures,
on other clients, and more than a point by 4,000 real inputs. Little (0.2 points) or nothing was
gained there by taking the held-out inputs, too, for the last fit, or by ridges for each input or
each output; nothing by ridges around weights mapped from each client's units to merged ones, by
giving every merged unit one owner's weights, by inputs shifted by up to 2 pixels, nor by choosing
among candidates by the divergence from the ensemble, by the probability that it gives to their
decisions, by the clients' votes or by the variance explained.

**VGG-9 with 1,000 inputs, Dir(0.5)**: 53.1 % against 55, and 53.4 % distilled. The bar comes from
clients of 57 % in the mean and an ensemble of 61.8 %; here they have 47.7 % and 56.0 %, and where
the ensemble has as much (61.5 %, seed 1) the merge has 58.2 %, distilled 58.4 %. The clients of
equal parts, which have the bar's 57.2 and 61.8 % and merge to 58.5 %, were added after that was
seen; no other recipe was tried.

Distillation on 1,000 inputs alone learns these by heart, so it is given mixtures of them, too. The
same command without and with them, on the CIFAR net: 44.7 (43.8 to 45.6) and 46.5 (46.3 to 46.7) %.

A fit by least squares varies less than what it is fitted to, the more so the worse units match, and
a deep net feels that. Hidden units get their targets' variance back, before the fit and after it:
chosen on training images that no client has, where VGG-9 and the CIFAR net gained by it.
"""
