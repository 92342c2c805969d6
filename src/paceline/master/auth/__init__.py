"""Authentication: sign-in links, passwords, and sign-ins of browsers."""

from paceline.master.auth._links import SignInLinks
from paceline.master.auth._passwords import Passwords, TooManyAttemptsError
from paceline.master.auth._sign_ins import SIGN_IN_S, SignIns

ADMIN = "admin"

__all__ = ["ADMIN", "SIGN_IN_S", "Passwords", "SignInLinks", "SignIns", "TooManyAttemptsError"]
