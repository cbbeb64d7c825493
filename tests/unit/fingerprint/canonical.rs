//! The canonical form of a JSON text, and what pointers cut out of it.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::fingerprint::Pointer;

fn cut(text: &str, pointers: &[&str]) -> Option<String> {
    let pointers: Vec<_> = pointers.iter().map(|pointer| Pointer::parse(pointer).expect("a pointer")).collect();
    let paths: Vec<_> = pointers.iter().map(Pointer::tokens).collect();
    Some(String::from_utf8(canonical(text.as_bytes(), &paths)?).expect("text"))
}

#[test]
fn one_value_has_one_text() {
    for (text, canonical) in [
        (" [ null , true,false ] ", "[null,true,false]"),
        (r#"{"b":{"d":1,"c":[{"f":2,"e":3}]},"a":[ ]}"#, r#"{"a":[],"b":{"c":[{"e":3,"f":2}],"d":1}}"#),
        (r#"{"a b":1,"a":2,"ab":3,"\u0061 ":4,"":{}}"#, r#"{"":{},"a":2,"a ":4,"a b":1,"ab":3}"#),
        (r#""\u00e9\/\u000a\\\"\u0001\ud83e\udd80""#, "\"é/\\n\\\\\\\"\\u0001\u{1f980}\""),
        ("1", "1"),
        ("1.0", "1"),
        ("1e0", "1"),
        ("10e-1", "1"),
        ("0.1e+1", "1"),
        ("100", "100"),
        ("1E2", "100"),
        ("12.50", "12.5"),
        ("125e-1", "12.5"),
        ("-0.25", "-0.25"),
        ("-25E-02", "-0.25"),
        ("0.050", "0.05"),
        ("5e-2", "0.05"),
        ("0", "0"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("0e999999999999999999999", "0"),
        ("1e39", "1000000000000000000000000000000000000000"),
        ("1e40", "1e40"),
        ("10000000000000000000000000000000000000000", "1e40"),
        ("1e-41", "0.00000000000000000000000000000000000000001"),
        ("0.00000000000000000000000000000000000000001", "0.00000000000000000000000000000000000000001"),
        ("1e-42", "1e-42"),
        ("0.000000000000000000000000000000000000000001", "1e-42"),
        ("9007199254740993.0", "9007199254740993"),
        ("340282366920938463463374607431768211455", "340282366920938463463374607431768211455"),
        ("1e99999999999999999999", "1e99999999999999999999"),
    ] {
        assert_eq!(cut(text, &[]).as_deref(), Some(canonical), "{text}");
        assert_eq!(cut(canonical, &[]).as_deref(), Some(canonical), "{canonical}");
    }
}

#[test]
fn the_parts_are_cut_out() {
    for (text, pointers, left) in [
        (r#"{"a": 1, "b": [ 1 , 2 ], "c": "}" }"#, &["/a"][..], r#"{"b":[1,2],"c":"}"}"#),
        (r#"{"a":{"b":1,"c":2},"b":3}"#, &["/a/b"], r#"{"a":{"c":2},"b":3}"#),
        (r#"[0,[1,2],{"a":3}]"#, &["/0", "/1/1", "/2/a"], r#"[[1],{}]"#),
        (r#"[ 0 , 1 , 2 , 3 ]"#, &["/0", "/1", "/3"], "[2]"),
        (r#"{"d":0,"c":1,"b":2,"a":3}"#, &["/d", "/b"], r#"{"a":3,"c":1}"#),
        (r#"{"a/b":1,"~":2,"":3,"\u0061":4,"é":5}"#, &["/a~1b", "/~0", "/", "/a", "/é"], "{}"),
        (r#"{"a":1,"a":2,"b":3}"#, &["/a"], r#"{"b":3}"#),
        (r#"["a","b"]"#, &["/-", "/00", "/2", "/a"], r#"["a","b"]"#),
        (r#"{"a":"\\","b":"\"","c":[]}"#, &["/b", "/b/c"], r#"{"a":"\\","c":[]}"#),
        (" true ", &["/a"], "true"),
    ] {
        assert_eq!(cut(text, pointers).as_deref(), Some(left), "{text} without {pointers:?}");
    }
}

#[test]
fn a_repeated_member_half_of_a_surrogate_pair_and_a_very_deep_text_have_no_canonical_form() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert_eq!(cut(&nested(MAX_DEPTH), &[]), Some(nested(MAX_DEPTH)));
    for text in [
        r#"{"a":1,"a":1}"#,
        r#"{"a":1,"b":2,"\u0061":3}"#,
        r#"[{"b":{"a":1,"a":2}}]"#,
        r#"{"a":"\ud800"}"#,
        r#"{"\udc00":1}"#,
        &nested(MAX_DEPTH + 1),
        &nested(100_000),
        &"{\"a\":".repeat(100_000),
    ] {
        assert_eq!(cut(text, &[]), None, "{:.40}", text);
    }
}

/// The same by way of a tree.
fn pruned(value: Value, paths: &[&[String]]) -> Value {
    match value {
        Value::Object(members) => members
            .into_iter()
            .filter_map(|(name, value)| Some((name.clone(), pruned(value, &beyond(paths, &name)?))))
            .collect(),
        Value::Array(elements) => elements
            .into_iter()
            .enumerate()
            .filter_map(|(index, value)| Some(pruned(value, &beyond(paths, &index.to_string())?)))
            .collect(),
        scalar => scalar,
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[\\[\\]{}\",:\\\\/~a0]{0,4}".prop_map(Value::from),
    ];
    scalar.prop_recursive(4, 40, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-c0\"/~]{0,2}", inner, 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn cutting_the_text_is_pruning_the_tree(
        json in any_json(),
        pointers in prop::collection::vec(prop::collection::vec("[a-c0-2\"/~]{0,2}", 1..4), 0..4),
        pretty in any::<bool>(),
    ) {
        let text = if pretty { serde_json::to_string_pretty(&json) } else { serde_json::to_string(&json) };
        let paths: Vec<_> = pointers.iter().map(Vec::as_slice).collect();
        let left = canonical(text.expect("text").as_bytes(), &paths).expect("a canonical form");
        let left: Value = serde_json::from_slice(&left).expect("still JSON");
        prop_assert_eq!(left, pruned(json, &paths));
    }
}
