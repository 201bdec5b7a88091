"""What an env and a policy cost: measured with the rollout that will collect, and what follows for each arrangement."""
