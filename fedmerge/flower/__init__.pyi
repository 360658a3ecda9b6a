from .client_apps import client_app as client_app
from .matched_averaging import MatchedAveraging as MatchedAveraging
from .rounds_on_grid import FedMA as FedMA
