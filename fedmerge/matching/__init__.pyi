from .assignment import (
    NEW as NEW,
    SOLVERS as SOLVERS,
    StepProblem as StepProblem,
    best_step as best_step,
    can_price as can_price,
    solve as solve,
    solve_at_price as solve_at_price,
    solve_priced as solve_priced,
)
from .features import (
    SKETCH as SKETCH,
    TieBreaker as TieBreaker,
    add_mapped as add_mapped,
    gather_units as gather_units,
)
from .group_matching import (
    keep_apart as keep_apart,
    match_units as match_units,
    represent as represent,
)
from .inner_units import match_inside as match_inside
from .scores import (
    ClientUnits as ClientUnits,
    GroupMatching as GroupMatching,
    Prior as Prior,
    Products as Products,
    SearchOptions as SearchOptions,
    Shortcuts as Shortcuts,
    SolverName as SolverName,
    TooWide as TooWide,
    UnitFeatures as UnitFeatures,
    client_units as client_units,
    existing_rewards as existing_rewards,
    new_rewards as new_rewards,
    prior_at_threshold as prior_at_threshold,
)
from .slots import (
    HOMELESS as HOMELESS,
    Slots as Slots,
    products_with_others as products_with_others,
)
