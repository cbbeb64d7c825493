//! `resolve` and `release`.
