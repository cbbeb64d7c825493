//! The form of an answer. Two answers to one request under different keys have the same form, although their values
//! differ.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::client::Answer;

/// The value of `Content-Type`, the names of the other headers, and the path of each member of a JSON object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Form(BTreeSet<String>);

impl Form {
    pub(crate) fn of(answer: &Answer) -> Self {
        let header = |(name, value): &(String, String)| {
            if name.eq_ignore_ascii_case("content-type") { format!("{name}: {value}") } else { name.clone() }
        };
        let mut parts = answer.headers.iter().map(header).collect();
        // A body that is not JSON has no members.
        let body = serde_json::from_slice(&answer.body).unwrap_or_default();
        add_members(&mut parts, "", &body);
        Self(parts)
    }

    /// The difference from the expected form, such as `lacks "id", and has "status"`. `None` if the forms are the same.
    pub(crate) fn unlike(&self, expected: &Self) -> Option<String> {
        let only = |verb: &str, one: &Self, other: &Self| {
            let parts: Vec<_> = one.0.difference(&other.0).map(String::as_str).collect();
            (!parts.is_empty()).then(|| format!("{verb} {}", parts.join(", ")))
        };
        let differences = [only("lacks", expected, self), only("has", self, expected)];
        differences.into_iter().flatten().reduce(|lacks, has| format!("{lacks}, and {has}"))
    }
}

/// Adds the path of each member. The elements of arrays are not members, because their number may vary.
fn add_members(parts: &mut BTreeSet<String>, path: &str, value: &Value) {
    for (name, value) in value.as_object().into_iter().flatten() {
        parts.insert(format!("\"{path}{name}\""));
        add_members(parts, &format!("{path}{name}."), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(headers: &[(&str, &str)], body: &str) -> Form {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Form::of(&Answer { headers, ..Answer::new(201, body) })
    }

    #[test]
    fn values_may_differ_and_names_and_the_content_type_may_not() {
        let (json, place) = (("content-type", "application/json"), ("location", "/1"));
        let body = r#"{"id":1,"payment":{"amount":100},"items":[]}"#;
        let expected = form(&[json, place], body);
        let other = r#"{"items":[{"a":1}],"payment":{"amount":101},"id":null}"#;
        assert_eq!(form(&[json, ("location", "/2")], other).unlike(&expected), None);
        for (headers, body, unlike) in [
            (&[json, place][..], r#"{"id":1,"payment":{},"items":[]}"#, r#"lacks "payment.amount""#),
            (&[json], body, "lacks location"),
            (
                &[("content-type", "text/plain"), place],
                body,
                "lacks content-type: application/json, and has content-type: text/plain",
            ),
            (&[json, place], "paid", r#"lacks "id", "items", "payment", "payment.amount""#),
        ] {
            assert_eq!(form(headers, body).unlike(&expected).as_deref(), Some(unlike));
        }
        assert_eq!(form(&[], "{}").unlike(&form(&[], "paid")), None);
        assert_eq!(form(&[], r#"{"status":"paid"}"#).unlike(&form(&[], "")).as_deref(), Some(r#"has "status""#));
    }
}
