//! The templates are those that axum's router accepts.

use super::{has_names, without_names};

#[test]
fn a_parameter_has_no_name_in_the_operation() {
    for (template, operation) in [
        ("POST /payments", "POST /payments"),
        ("POST /accounts/{id}/pay", "POST /accounts/{}/pay"),
        ("POST /accounts/{account_id}/pay", "POST /accounts/{}/pay"),
        ("POST /{a}/{b}", "POST /{}/{}"),
        ("POST /files/{*path}", "POST /files/{*}"),
        ("POST /v{version}/x", "POST /v{}/x"),
        ("POST /{konto-\u{fc}}", "POST /{}"),
    ] {
        assert_eq!(without_names(template), operation);
        assert!(!has_names(operation), "{operation}");
        assert_eq!(has_names(template), template != operation, "{template}");
    }
}

/// A literal brace is doubled. Without that, a literal path could have the operation of a route with a parameter.
#[test]
fn an_escaped_brace_is_no_parameter() {
    for (template, operation) in [
        ("POST /{{id}}", "POST /{{id}}"),
        ("POST /{{}}", "POST /{{}}"),
        ("POST /{{a}}/{b}", "POST /{{a}}/{}"),
        ("POST /{a{{b}}c}/d", "POST /{}/d"),
        ("POST /x{{{id}", "POST /x{{{}"),
    ] {
        assert_eq!(without_names(template), operation);
    }
}

#[test]
fn the_operation_of_an_operation_is_itself() {
    for operation in ["POST /a/{}/b", "POST /{*}", "POST /{{id}}/{}", "create_ride", ""] {
        assert_eq!(without_names(operation), operation);
    }
}
