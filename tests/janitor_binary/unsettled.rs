//! `unsettled`.
