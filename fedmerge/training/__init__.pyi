from .client_work import (
    EVALUATE as EVALUATE,
    LOOK as LOOK,
    TRAIN as TRAIN,
    ClientWork as ClientWork,
    evaluate_model as evaluate_model,
    look as look,
    train as train,
)
from .evaluation import (
    EnsembleEvaluation as EnsembleEvaluation,
    Evaluation as Evaluation,
    InferenceCost as InferenceCost,
    evaluate as evaluate,
    evaluate_ensemble as evaluate_ensemble,
    try_model as try_model,
)
from .inference import (
    ensemble_cost as ensemble_cost,
    inference_cost as inference_cost,
)
from .local_training import (
    Trained as Trained,
    array_dtypes as array_dtypes,
    choose_devices as choose_devices,
    choose_precision as choose_precision,
    load_arrays as load_arrays,
    read_arrays as read_arrays,
    tied_names as tied_names,
    train_model as train_model,
)
from .partitions import (
    Parts as Parts,
    split_by_dirichlet as split_by_dirichlet,
    split_by_key as split_by_key,
    split_homogeneously as split_homogeneously,
    write_shards as write_shards,
)
from .data_formats import FORMATS as FORMATS, Reading as Reading, open_columns as open_columns
from .samples import (
    Preparation as Preparation,
    parse_normalize as parse_normalize,
)
from .shards import (
    EVALUATION_KEYS as EVALUATION_KEYS,
    TRAINING_KEYS as TRAINING_KEYS,
    Pairing as Pairing,
    Shard as Shard,
    pair_shards as pair_shards,
    read_column as read_column,
    read_shard as read_shard,
    source_digest as source_digest,
)
from .tasks import (
    PADDING as PADDING,
    LearningTask as LearningTask,
    count_classes as count_classes,
    find_task as find_task,
)
