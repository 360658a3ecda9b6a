from .descent import Adam as Adam, lowest as lowest
from .augmentation import (
    AUGMENTATIONS as AUGMENTATIONS,
    Augmentation as Augmentation,
    augmentation_for as augmentation_for,
    kind_of as kind_of,
    mirrored as mirrored,
)
from .data import read_probes as read_probes
from .layer_calls import (
    Call as Call,
    CellCall as CellCall,
    LayerCall as LayerCall,
    Window as Window,
    names_of as names_of,
    patches as patches,
    run_heard as run_heard,
)
from .least_squares import (
    FewRows as FewRows,
    Fit as Fit,
    Gram as Gram,
    GramSum as GramSum,
    Moments as Moments,
    best_ridge as best_ridge,
    few_rows as few_rows,
    lively_ridge as lively_ridge,
)
from .noise import (
    Leaves as Leaves,
    Spectrum as Spectrum,
    dead_leaves as dead_leaves,
    noise_probes as noise_probes,
)
from .options import CHANGES as CHANGES, ProbeOptions as ProbeOptions, Source as Source
from .probe_inputs import picture_shape as picture_shape
from .probe_inputs import Probes as Probes
from .probe_inputs import normalised as normalised, unit_responses as unit_responses
from .sources import (
    is_language_model as is_language_model,
    NOISE_SHARE as NOISE_SHARE,
    STEPS as STEPS,
    STEPS_TO_STATISTICS as STEPS_TO_STATISTICS,
    ProbedClients as ProbedClients,
    make_probes as make_probes,
)
from .synthetic import (
    Ascent as Ascent,
    distance_from_statistics as distance_from_statistics,
    draw_targets as draw_targets,
    synthetic_probes as synthetic_probes,
    watched_norms as watched_norms,
)
from .text import generated_probes as generated_probes
