"""The ways to compute a mechanism. Each says what it cannot serve; `regard.explain` shows the choice."""
