"""What the engine offers × kinds of models: one table, which the tests run and the page shows."""
