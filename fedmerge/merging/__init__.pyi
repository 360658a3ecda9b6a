from .averages import Averaging as Averaging, average_tensor as average_tensor
from .answers import (
    ALIKE_COUNT as ALIKE_COUNT,
    Answers as Answers,
    collect_answers as collect_answers,
    pooled_weights as pooled_weights,
    with_voices as with_voices,
)
from .by_probes import (
    HELD_OUT as HELD_OUT,
    probe_clients as probe_clients,
    choose_merge as choose_merge,
    match_by_responses as match_by_responses,
    represent_clients as represent_clients,
    respond as respond,
    with_weights as with_weights,
)
from .by_weights import match_group as match_group, solve as solve
from .candidates import Candidate as Candidate, matched_candidates as matched_candidates
from .client_modules import ClientModules as ClientModules
from .client_sources import expand_sources as expand_sources, open_clients as open_clients
from .comparison import Comparison as Comparison, Row as Row
from .evaluations import EvaluationOptions as EvaluationOptions, evaluate as evaluate
from .fit import Fitter as Fitter
from .importance import (
    Selection as Selection,
    allocate as allocate,
    loss_curve as loss_curve,
    select_all as select_all,
    select_units as select_units,
    unit_importance as unit_importance,
)
from .frontier import GROWTHS as GROWTHS, Frontier as Frontier
from .client_modules import own_norms as own_norms, steady_weights as steady_weights
from .merge_record import (
    NEVER as NEVER,
    REPLAYED as REPLAYED,
    REPLAYED_PROBES as REPLAYED_PROBES,
    REPLAYED_ROUNDS as REPLAYED_ROUNDS,
    MergeRecord as MergeRecord,
    check_says_no_more as check_says_no_more,
    file_beside as file_beside,
    group_entry as group_entry,
    record_from_json as record_from_json,
)
from .methods import merge_session as merge_session
from .options import MatchOptions as MatchOptions, option_name as option_name
from .output_differences import relative_difference as relative_difference
from .outlying_clients import (
    Likeness as Likeness,
    likeness as likeness,
    outliers as outliers,
    outlying as outlying,
)
from .quality import (
    Agreement as Agreement,
    Position as Position,
    Quality as Quality,
    agreement as agreement,
    outputs_on as outputs_on,
    are_class_scores as are_class_scores,
    decisions_of as decisions_of,
    same_decisions as same_decisions,
    ensemble_weights as ensemble_weights,
    mean_outputs as mean_outputs,
    probabilities as probabilities,
)
from .refinement import (
    FEWEST_STEPS as FEWEST_STEPS,
    SHARES as SHARES,
    SPENDING as SPENDING,
    Refiner as Refiner,
    Spending as Spending,
    between as between,
    refinement_loss as refinement_loss,
    share_of_rate as share_of_rate,
    started_from as started_from,
)
from .record_schema import GroupEntry as GroupEntry, SourceEntry as SourceEntry, rounded as rounded
from .result import Merge as Merge, Solution as Solution
from .session import Session as Session, prepare as prepare
from .transport import coupling as coupling
from .verification import verify as verify
