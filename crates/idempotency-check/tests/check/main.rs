//! The check, on services that are right and wrong: through the library, and through the binary.

#[path = "../services/port.rs"]
mod port;
#[path = "../../examples/shop.rs"]
#[allow(dead_code, reason = "the example has a main function")]
mod shop;
mod support;

mod bad_input;
mod binary;
mod interruptions;
mod library;
mod requests;
mod tls;
