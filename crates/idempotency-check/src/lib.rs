//! wip
mod proxy;
pub mod wire;
