from .matched_averaging import MatchedAveraging as MatchedAveraging
