"""Families of mechanisms, by what their weights are made of.

    similarity over its sum         regard.core.families.mechanism.Mechanism: state `similarity(q, k)`
    similarity as it is             regard.core.families.mechanism.UnnormalisedMechanism: likewise
    softmax of scores               scores.ScoreMechanism: state `score(q, k)`
    inner products of features      features.FeatureMechanism: state `features(x)` and `feature_length`
    sums that every token changes   recurrent.RecurrentMechanism: state `table` and `walk`
    sums that fade                  fading.FadingMechanism: state `log_gates(k, real)`
    between channels                channels.ChannelMechanism: state `size(tokens, channels)`

A family knows what its members share (how weights are made, what is kept of a history, which paths there are, what it
costs); a mechanism states its formula, in one file of mechanisms/.
"""
