"""The models that draft: pure maths on tensors, no Ray, vLLM, Accelerate, MLflow or RL."""
