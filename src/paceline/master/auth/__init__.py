"""Authentication: tokens, sign-in links, passwords, and sign-ins of browsers."""

from paceline.master.auth._attempt_tokens import AttemptTokens
from paceline.master.auth._passwords import Passwords, TooManyAttemptsError
from paceline.master.auth._sign_in_links import SignInLinks
from paceline.master.auth._sign_in_throttle import Throttle, sender_at
from paceline.master.auth._sign_ins import SIGN_IN_S, SignIns
from paceline.master.auth._tokens import StoredToken, TokenNameTakenError, Tokens

ADMIN = "admin"

__all__ = [
    "ADMIN",
    "SIGN_IN_S",
    "AttemptTokens",
    "Passwords",
    "SignInLinks",
    "SignIns",
    "StoredToken",
    "Throttle",
    "TokenNameTakenError",
    "Tokens",
    "TooManyAttemptsError",
    "sender_at",
]
