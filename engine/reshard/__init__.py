"""From the training layout to the generation layout and back, with one copy of the weights."""
