from .matched_aggregator import MatchedAggregator as MatchedAggregator
from .persistor import GlobalModelPersistor as GlobalModelPersistor
from .recipes import (
    FedMARecipe as FedMARecipe,
    use_installed as use_installed,
)
from .rounds_of_job import FedMA as FedMA
from .sites import serve as serve
