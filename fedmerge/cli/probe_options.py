"""The parameters of merges that look at what clients do on probe inputs."""

from __future__ import annotations

from pathlib import Path

from fedmerge.cli.parameters import flag, option

_PROBES = "Probes (with --model or a .pt2)"
PROBE = option(
    "probe",
    str | None,
    _PROBES,
    "Inputs on which units are compared: noise, or made from the clients (default: the latter, "
    "noise for costly models), or none, for weights alone.",
    metavar="noise|synthetic|none",
)
PROBE_DATA = option(
    "probe_data",
    str | None,
    _PROBES,
    "Real inputs instead, no labels: x in .npz, .pt or .safetensors.",
    metavar="FILE",
)
PROBE_COUNT = option(
    "probe_count", int | None, _PROBES, "How many probes (default: up to 1000).", metavar="N"
)
PROBE_MEAN = option(
    "probe_mean",
    str | None,
    _PROBES,
    "Mean of noise, one or per channel (default: 0).",
    metavar="M[,M…]",
)
PROBE_STD = option(
    "probe_std",
    str | None,
    _PROBES,
    "Deviation of noise, one or per channel (default: 1).",
    metavar="S[,S…]",
)
PROBE_NORMALIZE = option(
    "normalize",
    str | None,
    _PROBES,
    "Mean and deviation of x/255, where --probe-data holds bytes.",
    "--normalize",
    metavar="MEAN,STD",
)
PROBE_CHANNELS_LAST = flag(
    "channels_last", _PROBES, "Images in --probe-data have their channels last."
)
SIGNATURE = option(
    "signature",
    str | None,
    _PROBES,
    "What units are compared by (default: both).",
    metavar="weights|activations|both",
)
MERGE_UNITS = option(
    "merge_units",
    str | None,
    _PROBES,
    "Average what matches, or fit every layer to it on the probes (default: the better).",
    metavar="mean|fit",
)
CORRECT = option(
    "correct",
    str | None,
    _PROBES,
    "What averaged units get back: their owners' weight norms (of files alone, too), or means "
    "and variances on the probes (default: none).",
    metavar="none|norm|moments",
)
BATCH_NORM = option(
    "batch_norm",
    str | None,
    _PROBES,
    "Statistics of averaged batch norms: the owners' mean, or anew from the probes "
    "(default: mean).",
    metavar="mean|reestimate",
)
LEAD = option(
    "lead",
    str | None,
    _PROBES,
    "The client that shared units are taken from (default: the better of nobody and the "
    "client most alike the ensemble).",
    metavar="NAME|none",
)
DISTILL = flag(
    "distill",
    _PROBES,
    "Train the merge on the probes to answer as the clients' ensemble does, without labels.",
)
DISTILL_STEPS = option(
    "distill_steps", int | None, _PROBES, "Steps of that training (default: 500).", metavar="N"
)
FRONTIER = flag(
    "frontier",
    _PROBES,
    "Also show what merges of other sizes would give, up to the ensemble itself.",
)
FRONTIER_PLOT = option(
    "frontier_plot", Path | None, _PROBES, "Draw that, too.", metavar="FILE.svg|FILE.png"
)
SYMMETRIES = flag(
    "symmetries",
    _PROBES,
    "Before matching, give units the signs, and embeddings the bases, in which clients are "
    "most alike, where that changes nothing of what they compute.",
    "--symmetries/--no-symmetries",
    default=True,
)
DROP_OUTLIERS = flag(
    "drop_outliers", _PROBES, "Leave out clients that answer unlike the others, or hold NaN."
)

PROBES = (PROBE, PROBE_DATA, PROBE_COUNT, PROBE_MEAN, PROBE_STD)
PROBE_PIXELS = (PROBE_NORMALIZE, PROBE_CHANNELS_LAST)
PROBED = (SIGNATURE, MERGE_UNITS, CORRECT, BATCH_NORM, LEAD, SYMMETRIES)
IMPROVED = (DROP_OUTLIERS, DISTILL, DISTILL_STEPS, FRONTIER, FRONTIER_PLOT)
