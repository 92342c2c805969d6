"""paceline._cluster"""
