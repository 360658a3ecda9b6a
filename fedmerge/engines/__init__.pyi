from .engine import (
    ClientInfo as ClientInfo,
    Engine as Engine,
    Outcome as Outcome,
    Reply as Reply,
    RetryPolicy as RetryPolicy,
    Status as Status,
    StepResult as StepResult,
    Task as Task,
    find_work as find_work,
    run_step as run_step,
    usable_cores as usable_cores,
)
from .flower_engine import FlowerEngine as FlowerEngine, answer_tasks as answer_tasks
from .local import LocalEngine as LocalEngine
from .nvflare_engine import (
    MESSAGE as MESSAGE,
    NvflareEngine as NvflareEngine,
    answer_model as answer_model,
)
from .processes import (
    ProcessEngine as ProcessEngine,
    default_workers as default_workers,
    receive as receive,
    send as send,
)
from .ray_cluster import (
    Homes as Homes,
    Node as Node,
    Share as Share,
    check_installed as check_installed,
    connect as connect,
    is_address as is_address,
)
from .ray_engine import RayEngine as RayEngine
from .remote import (
    Answer as Answer,
    Site as Site,
    answer_of as answer_of,
    from_bytes as from_bytes,
    to_bytes as to_bytes,
    unreadable as unreadable,
)
