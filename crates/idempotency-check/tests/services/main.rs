//! Services
mod planted;
