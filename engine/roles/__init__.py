"""What a rank can be: the actor (later critic, reference, reward model)."""
