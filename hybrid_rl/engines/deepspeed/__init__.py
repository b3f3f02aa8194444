"""DeepSpeed as the training engine of actor and critic."""
