from .charts import (
    MOST_BARS as MOST_BARS,
)
from .contents import (
    CellPicture as CellPicture,
    Curve as Curve,
    Edge as Edge,
    Fact as Fact,
    FeatureMaps as FeatureMaps,
    FrontierPoint as FrontierPoint,
    GroupView as GroupView,
    Match as Match,
    Missing as Missing,
    PlanPicture as PlanPicture,
    Reference as Reference,
    Report as Report,
    RoundsView as RoundsView,
    Score as Score,
    Scores as Scores,
    SourceView as SourceView,
    Stage as Stage,
    UnitRow as UnitRow,
)
from .drawing import (
    SERIES as SERIES,
    as_file as as_file,
    check_drawing as check_drawing,
    new_figure as new_figure,
    settings as settings,
)
from .page import (
    TEMPLATES as TEMPLATES,
    render as render,
    render_frontier as render_frontier,
    render_plan as render_plan,
    table_rows as table_rows,
)
from .plan_figure import (
    assign_lanes as assign_lanes,
    draw_plan as draw_plan,
    plan_picture as plan_picture,
    plan_remarks as plan_remarks,
)
from .round_features import (
    layer_columns as layer_columns,
    layer_sites as layer_sites,
)
from .sections import (
    APART as APART,
    AVERAGED as AVERAGED,
    UNRECORDED as UNRECORDED,
    frontier_points as frontier_points,
    group_views as group_views,
    last_metrics as last_metrics,
    predicted_scores as predicted_scores,
    rounds_view as rounds_view,
    run_scores as run_scores,
    verdict as verdict,
)
from .unit_features import (
    NEGATIVE as NEGATIVE,
    UNSHARED as UNSHARED,
    Look as Look,
    Seen as Seen,
    conv_layers as conv_layers,
    maps_of as maps_of,
    merge_columns as merge_columns,
)
