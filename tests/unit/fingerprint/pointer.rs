//! Pointers, and what they cut out of a text.

use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn cut(text: &str, pointers: &[&str]) -> Option<String> {
    let pointers: Vec<_> = pointers.iter().map(|pointer| Pointer::parse(pointer).expect("a pointer")).collect();
    Some(String::from_utf8(without(text.as_bytes(), &pointers).ok()?).expect("text"))
}

#[test]
fn the_parts_are_cut_out_and_the_rest_is_unchanged() {
    for (text, pointers, left) in [
        (r#"{"a": 1, "b": [ 1 , 2 ], "c": "}" }"#, &["/a"][..], r#"{"b":[ 1 , 2 ],"c":"}"}"#),
        (r#"{"a":{"b":1,"c":2},"b":3}"#, &["/a/b"], r#"{"a":{"c":2},"b":3}"#),
        (r#"[0,[1,2],{"a":3}]"#, &["/0", "/1/1", "/2/a"], r#"[[1],{}]"#),
        (r#"{"a/b":1,"~":2,"":3,"\u0061":4,"é":5}"#, &["/a~1b", "/~0", "/", "/a", "/é"], "{}"),
        (r#"{"a":1,"a":2,"b":3,"b":4}"#, &["/a"], r#"{"b":3,"b":4}"#),
        (r#"{"a":9007199254740993.0,"b":1e400}"#, &["/c"], r#"{"a":9007199254740993.0,"b":1e400}"#),
        (r#"["a","b"]"#, &["/-", "/00", "/2", "/a"], r#"["a","b"]"#),
        (r#"{"a":"\\","b":"\"","c":[]}"#, &["/b", "/b/c"], r#"{"a":"\\","c":[]}"#),
        (" true ", &["/a"], "true"),
    ] {
        assert_eq!(cut(text, pointers).as_deref(), Some(left), "{text} without {pointers:?}");
    }
}

#[test]
fn a_text_that_is_not_json_is_refused_even_if_the_fault_would_be_cut_out() {
    for text in ["", "{", "{}{}", r#"{"a":nul}"#, r#"{"a":1,}"#, r#"{"a":"\x"}"#, "[1 2]"] {
        assert_eq!(cut(text, &["/a"]), None, "{text}");
    }
}

#[test]
fn what_is_very_deep_is_no_deeper_for_this() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(cut(&deep, &["/a"]).as_deref(), Some("{}"));
    assert_eq!(cut(&deep, &["/b"]).as_deref(), Some(&*deep));
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
        let pointers: Vec<_> = pointers.into_iter().map(|tokens| Pointer { tokens }).collect();
        let left = without(text.expect("text").as_bytes(), &pointers).expect("JSON");
        let left: Value = serde_json::from_slice(&left).expect("still JSON");
        let paths: Vec<_> = pointers.iter().map(Pointer::tokens).collect();
        prop_assert_eq!(left, pruned(json, &paths));
    }
}
