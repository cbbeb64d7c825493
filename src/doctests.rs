//! The documents whose code is compiled with the doctests.

#[cfg(feature = "axum")]
#[doc = include_str!("../README.md")]
mod readme {}

#[cfg(feature = "testing")]
#[doc = include_str!("../docs/testing.md")]
mod tutorial {}

#[cfg(feature = "testing")]
#[doc = include_str!("../docs/protect.md")]
mod guide_to_protection {}

#[cfg(feature = "axum")]
#[doc = include_str!("../docs/axum.md")]
mod guide_for_axum {}

#[cfg(feature = "axum")]
#[doc = include_str!("../docs/events.md")]
mod guide_for_events {}

#[cfg(feature = "axum")]
#[doc = include_str!("../docs/troubleshooting.md")]
mod guide_for_troubleshooting {}

#[doc = include_str!("../docs/migrations.md")]
mod guide_for_migrations {}

#[doc = include_str!("../docs/managed.md")]
mod guide_for_managed {}

#[cfg(feature = "testing")]
#[doc = include_str!("../docs/steps.md")]
mod guide_to_steps {}
