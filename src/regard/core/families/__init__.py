"""Families of mechanisms, by how their weights are made.

    similarity over its sum         regard.core.families.mechanism.Mechanism: define `similarity(q, k)` similarity as it
    is             regard.core.families.mechanism.UnnormalisedMechanism: likewise softmax of scores
    scores.ScoreMechanism: define `score(q, k)` inner products of features      features.FeatureMechanism: define
    `features(x)` and `feature_length` (linear attention) sums that every token changes   recurrent.RecurrentMechanism:
    define `table` and `walk` sums that fade                  fading.FadingMechanism: define `log_gates(k, real)` (gated
    linear attention) between channels channels.ChannelMechanism: define `size(tokens, channels)`

A family holds what its members share: how weights are made, what the state is, which paths there are, what it costs. A
mechanism defines its formula, in one file of mechanisms/.
"""
