use super::{Trace, known_part, trace_id};
const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// The rules of W3C Trace Context, section 3.2 and "Versioning of traceparent".
#[test]
fn a_traceparent_is_taken_or_ignored_by_the_rules_of_the_standard() {
    assert_eq!((known_part(VALID), trace_id(VALID)), (Some(VALID), Some("4bf92f3577b34da6a3ce929d0e0e4736")));
    for later in ["01", "cc", "fe"] {
        let known = VALID.replacen("00", later, 1);
        assert_eq!((known_part(&known), Trace::of(&known).as_str()), (Some(&*known), Some(&*known)));
        assert_eq!(known_part(&format!("{known}-what-the-future-brings")), Some(&*known));
        assert_eq!(known_part(&format!("{known}.")), None);
    }
    for invalid in [
        "",
        "traceparent",
        &VALID[..54],
        &format!("{VALID}-01"),
        &format!("{VALID},{VALID}"),
        &format!(" {VALID}"),
        &VALID.replacen("00", "ff", 1),
        &VALID.replacen("00", "0x", 1),
        &VALID.replace('f', "F"),
        &VALID.replace('-', "_"),
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473-000f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0g",
        "00-4bf92f3577b34da6a3ce929d0e0e473é-0f067aa0ba902b7-01",
    ] {
        assert_eq!(known_part(invalid), None, "{invalid}");
        assert_eq!(Trace::of(invalid).as_str(), None);
    }
}
