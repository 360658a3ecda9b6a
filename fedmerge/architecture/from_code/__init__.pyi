from .branch_search import (
    Way as Way,
    Ways as Ways,
    ways_of as ways_of,
)
from .growth_probe import (
    probe_growth as probe_growth,
)
from .labels import (
    Fixed as Fixed,
    Label as Label,
    Labels as Labels,
    Same as Same,
    concat as concat,
    labels_of as labels_of,
    product as product,
)
from .module_plan import (
    WHY_UNSOLVED as WHY_UNSOLVED,
    WHY_UNTRIED as WHY_UNTRIED,
    fix_widths as fix_widths,
    freed_untried as freed_untried,
    held_untried as held_untried,
    let_go as let_go,
    plan_model as plan_model,
    plan_walked as plan_walked,
)
from .modules import (
    deduce_inputs as deduce_inputs,
    evaluating as evaluating,
    exported_inputs as exported_inputs,
    float_tensors as float_tensors,
    load_factory as load_factory,
)
from .program_budget import (
    Budget as Budget,
    BudgetError as BudgetError,
)
from .programs import (
    ExportedProgram as ExportedProgram,
    known_names as known_names,
    operator_of as operator_of,
    program_inputs as program_inputs,
)
from .soundness import (
    generic_model as generic_model,
    lowest_precision as lowest_precision,
    permuted as permuted,
    pin_misfits as pin_misfits,
    random_moves as random_moves,
    run as run,
    verify_plan as verify_plan,
)
from .tracing import (
    Walked as Walked,
    walk_model as walk_model,
)
