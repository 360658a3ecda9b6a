from .arrays import (
    Array as Array,
    Float64Array as Float64Array,
    FloatArray as FloatArray,
    IntArray as IntArray,
)
from .clients import (
    Client as Client,
    Program as Program,
    TensorInfo as TensorInfo,
)
from .nesting import (
    possible_outers as possible_outers,
    with_inside as with_inside,
)
from .plans import (
    OUTPUT as OUTPUT,
    Assignment as Assignment,
    Concat as Concat,
    Group as Group,
    Layout as Layout,
    Norm as Norm,
    Pinned as Pinned,
    Plan as Plan,
    Product as Product,
    TensorPlan as TensorPlan,
    Units as Units,
    axis_size as axis_size,
    groups_in as groups_in,
    index_map as index_map,
    inner_groups as inner_groups,
    outer_groups as outer_groups,
    plain_products as plain_products,
    replace_groups as replace_groups,
    terms as terms,
    unit_positions as unit_positions,
)
from .run_settings import (
    Stage as Stage,
    TrainSettings as TrainSettings,
    default_settings as default_settings,
)
from .wording import (
    AVERAGE as AVERAGE,
    BY_WEIGHTS as BY_WEIGHTS,
    IN_PLACE as IN_PLACE,
    MOST_LISTED as MOST_LISTED,
    MOST_ROWS as MOST_ROWS,
    Progress as Progress,
    percent as percent,
    silent as silent,
)
from .work import (
    Arrays as Arrays,
    JsonObject as JsonObject,
    Place as Place,
    WorkResult as WorkResult,
)
