"""What the page of many clients says around its numbers."""

INTRODUCTION = """\
# Many clients

Written by `benchmarks/many_clients.py page`; do not edit. What a merge and a pass of rounds take
with 10 to 1,000 small clients, what that means for a million on paper, and what is lost if sites
merge their own clients first.

Times are CPU seconds of one thread, since other work ran on the machine; memory is a process's peak
beyond that of the same command with two clients; bytes are those of the numbers that clients and
server exchange, without what a transport adds.
"""

COMMANDS = """\
```sh
.venv/bin/python benchmarks/many_clients.py scaling
.venv/bin/python benchmarks/many_clients.py scaling --engine ray --clients 100 1000
.venv/bin/python benchmarks/many_clients.py sites mnist.npz
.venv/bin/python benchmarks/many_clients.py page --docs docs # nothing is run
```
"""

MEASURED = """\
## From 10 to 1,000 clients

The net has 64 inputs, 32 hidden units and 10 outputs (2,410 parameters); every client began with
weights of its own and trained on 64 of scikit-learn's digits, skewed by class (Dir(0.5)). `match`
of the files, by default (down: the merged model to every client):
"""

ROUND = """\
One pass of `retrain` from the same files, by the `local` engine: the hidden layer is matched
(round 1), all clients train the last layer behind it for three epochs, and it is averaged
(round 2). The server's time includes opening all files, building every client's net, checks, and
the state saved after every round:
"""

OVER_RAY = """\
The same pass [over Ray](how-to/cluster.md), a cluster of its own on this machine. The server's CPU
time now includes sending tasks and receiving results, but no training. By the clock, the round in
which all clients train:
"""

EACH_OVER_RAY = """\
Most of its time with {few} clients is the start of worker processes, which import torch; every
further client takes {each:.0f} ms, its training included.
"""

LINEAR = """\
From {before} to {last} clients `match` grows as clients^{match:.2f} and the server's part of a
pass as clients^{rounds:.2f} (1 is linear). The global width does not depend on the number of
clients: the size budget (`--max-growth`, here 1.5) holds it. Without one (`none`) it grows with the
clients, and with it the time of every step: then the whole is quadratic.
"""

FOUND = """\
What 1,000 clients showed, and what became of it:

- The first try of a merge within a budget is one without it, whose width grew to 2,622 units and
  took two thirds of all time. It is given up now as soon as it is twice as wide as can fit: the
  same bytes in 28 instead of 69 CPU seconds, and 176 MB less memory.
- With `--model`, every pair of clients is compared to find outliers. That is quadratic in the
  clients and stays so, but a pair takes a thirtieth of the time it did: 11 CPU seconds for 1,000
  clients. The rest of a merge with probes (units matched at 11 widths, a fit per candidate) is
  linear, but about ten times as dear as one from weights alone: 25 CPU seconds at 100 clients. For
  many clients, merge without `--model`.
- Over Ray, the nodes were looked at after every step of every task, and each look went through all
  clients: 30 ms a task. It is once a second now: 5 ms a task that does nothing, at 100 clients and
  at 1,000 (both under a profiler, which makes the first look larger; without one, the server's CPU
  time for 1,000 clients fell from 19.9 to 13.8 seconds).
- Files are opened one at a time: 1,000 clients and shards pass with 256 open files allowed.
- Titles, tables, notes and the command to check a merge with name few clients and count the rest;
  `--json` and the record name all.
- The page of `report` draws one row per client in some figures, which have no room for 1,000.
"""

FORMULAS = """\
## On to a million, on paper

With J clients, P parameters each, L units of D features in a layer, W global units, 4 bytes a
number, and S sweeps at most (20 by default):

- **The server holds** the features of one layer of all clients, 4·J·L·D bytes; the products kept
  between visits, 4·J·L·W but at most 268 MB; the sums of the global units, 4·W·D; one client's
  cost matrix, 8·L·W. Only the first grows with J without bound. A pass also holds all clients'
  unmatched layers, up to 4·J·P (a task carries them, so that clients need no memory of their own),
  and writes them to disk after every round.
- **It computes** for each group and sweep J steps of one L×D by D×W product, 2·L·D·W operations,
  and one assignment of L rows to W columns, at most about L²·W: in all J·S·(2·L·D·W + L²·W), linear
  in J while W is bounded.
- **It sends and receives** per pass and client its P parameters once up, and the global layers
  (up to the budget × P) once down, with 8 bytes a unit for its places.

The last two runs, carried on along a straight line. Nothing beyond 1,000 was run: caches, file
systems and schedulers will differ, so take the numbers as orders of magnitude.
"""

LIMITS = """\
Where it breaks, first to last, with this small net and as the code is:

1. **Stragglers.** A round waits for every client or its timeout. Of thousands some are always slow
   or gone; `--client-timeout`, `--retries` and `--min-clients` bound that, but each miss costs a
   timeout, and every round asks all clients.
2. **Records inside safetensors.** The format allows a header of 100 MB, and the record names every
   client and unit: `match -o x.safetensors` is refused at about {record} clients, the state of
   `retrain` at about {header}. `.pt` outputs keep the record in a file beside, without a limit.
3. **Memory.** 16 GB are reached at about {memory} clients by `match`, at about {held} by a pass. By
   the formulas a client takes 8.3 kB of features and 6.1 kB of products; the rest are weights
   read, names, paths and places as Python holds them, an overhead of this code and not of the
   method. With larger nets memory comes first: of a net of 14 MB already 1,100 clients are 16 GB.
4. **Time of matching.** A day of one core is reached at about {day} clients. Visits depend on
   each other, so that more cores only help inside a step, and these are small in small nets.
5. **Bytes.** A pass of a million clients brings {million} up: {link} of one gigabit link for this
   net, a thousand times that for one of 10 MB.
6. **Files.** A million files in one folder work, slowly; `match` reads every file more than once
   (weights for each layer, and a digest for the record).

What changes that:

- **Sampling clients.** A round with c of J clients costs what c clients cost: in all the formulas J
  becomes c, but for the state of those that wait. fedmerge has no option for it: today you sample
  by giving a part of the files to `match`, or of the shards to `retrain`.
- **Two levels.** With s sites each merges J/s clients at the same time, and the centre s models:
  time and memory per server fall from J to max(J/s, s), which is smallest at s = √J (a million
  clients: 1,000 each). The centre gets s models instead of J. What it loses is measured below.
"""

LEVELS = """\
## Two levels: within sites, then between them

Each site merges its own clients by `match` (weights: their numbers of samples; the last layer by
class counts); the centre merges the sites' models, each with the sum of its clients' weights and
counts. Both levels together may grow as much as one: the sites' models to the factor given, the
centre's no more. Neighbours share a site, so a site is as skewed as its clients happen to be.
With a *round*, the last layer is trained by all clients behind the matched one before it is
averaged, in two levels within each site only.

10,000 images of MNIST (14×14 pixels) for all clients, 64 hidden units, 10 epochs of local training;
accuracy on 10,000 test images, mean of three seeds (least to most). The *average* is of equal
places, weighted alike.
"""

STARTS = {
    "independent": "Clients that begin with weights of their own",
    "shared": "Clients that begin with the same weights",
}

LOST = """\
### What the second level costs
"""

SERVERS = """\
The servers' work at growth 1.5 without rounds, from independent starts (mean of all splits and
seeds; *one after another*: the slowest site and then the centre):
"""

MEANING = """\
The element-wise average in two levels is exactly the one in one level, weights and class counts
included (a test says so), and so is any matching that finds the same units. What is lost comes from
the centre: it sees each site's means only, and cannot take apart what a site has put together.
Growth lessens it, for units that match badly stay apart within the site.
"""
