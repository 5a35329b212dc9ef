"""The drafter trainer: fresh rollouts in, drafter versions out."""
