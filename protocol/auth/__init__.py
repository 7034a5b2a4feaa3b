"""Who may do what (RocketMQ's ACL 2.0): signatures, users and policies, decisions. Pure rules, sans-IO."""
