"""The drafter trainer: fresh rollouts in, drafter weights out."""
