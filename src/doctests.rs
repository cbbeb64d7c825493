//! The document outside the crate's documentation whose code is compiled with the doctests.

#[cfg(feature = "axum")]
#[doc = include_str!("../README.md")]
mod readme {}
