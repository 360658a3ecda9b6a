from .client_training import ModelNames as ModelNames, evaluation_values as evaluation_values
from .events import (
    ClientFailed as ClientFailed,
    ClientFinished as ClientFinished,
    ClientStarted as ClientStarted,
    Event as Event,
    RoundDone as RoundDone,
    RoundStarted as RoundStarted,
    RunFinished as RunFinished,
    RunStarted as RunStarted,
    ignore as ignore,
)
from .afl import nearest_weights as nearest_weights
from .fedavg import averaging_rounds as averaging_rounds
from .federation import (
    Exchange as Exchange,
    Federation as Federation,
    LocalModel as LocalModel,
    Round as Round,
    cut_ties as cut_ties,
    pad_ties as pad_ties,
    place_units as place_units,
)
from .fedma import (
    FedMA as FedMA,
    layers_of as layers_of,
    local_arrays as local_arrays,
    matching_rounds as matching_rounds,
)
from .inputs import (
    check_model as check_model,
    open_start as open_start,
)
from .options import (
    EngineName as EngineName,
    RetrainOptions as RetrainOptions,
    Running as Running,
    changed_retrain_options as changed_retrain_options,
    retrain_options as retrain_options,
    running_options as running_options,
)
from .preparation import Run as Run, open_run as open_run, prepare_run as prepare_run
from .retraining import run_prepared as run_prepared
from .rounds import Rounds as Rounds
from .sharding import (
    Partition as Partition,
    PartitionOptions as PartitionOptions,
    partition as partition,
)
from .survey import ShardEntry as ShardEntry, output_class_counts as output_class_counts
from .run_folder import (
    RUN_FILE as RUN_FILE,
    STATE_FILE as STATE_FILE,
    WorkDir as WorkDir,
    first_difference as first_difference,
)
from .state import (
    SavedState as SavedState,
    state_to_file as state_to_file,
)
from .work_dir import (
    SEAL as SEAL,
    MatchedLayer as MatchedLayer,
    load_layer as load_layer,
    read_sealed as read_sealed,
    read_sealed_text as read_sealed_text,
    write_sealed as write_sealed,
    write_sealed_text as write_sealed_text,
)
