// The theme's search takes every word of a query as the beginning of a word, so that "a" matches all that begins with it.
// What each question holds ("how do I ...") is left out before a query reaches the search, unless nothing else is there.
// The search splits names at "_". Beside the parts of `val_check_interval`, a query gets the name in one piece, which the
// entries of arguments and flags have as a tag: docs/hooks/search.py.
(() => {
  const QUERY = 2; // the type of the messages that ask the theme's search worker
  const GRAMMAR = new Set(
    (
      "a about after all an and any are as at be because been before both but by can could did do does doing for from " +
      "get gets had has have how i if in into is it its keep make me mean my need no not of off on one or our own per " +
      "please should so some than that the their them then there these they this those to too use using want was way " +
      "we were what what's when where which while who why will with without would you your"
    ).split(" ")
  );
  const send = Worker.prototype.postMessage;

  function withoutGrammar(query) {
    if (/["+~^*]/.test(query)) return query; // it is in the search's own notation
    const words = query.replace(/[?!;]+(?=\s|$)/g, " ").trim().split(/\s+/);
    const kept = words.filter((word) => !GRAMMAR.has(word.toLowerCase()));
    return (kept.length ? kept : words).join(" ");
  }

  function withWholeNames(query) {
    if (/["+~^*]/.test(query)) return query;
    return query.replace(/(?<!\S)(--)?([a-z0-9]+(?:[_-][a-z0-9]+)*)(?!\S)/gi, (word, dashes, name) => {
      const parts = name.split(dashes ? /[_-]/ : "_");
      if (parts.length === 1 && !dashes) return word;
      return `${dashes ? "flag" : ""}${parts.join("").toLowerCase()}^1000 ${parts.join(" ")}`;
    });
  }

  Worker.prototype.postMessage = function (message, ...more) {
    if (message && message.type === QUERY && typeof message.data === "string") {
      message = { ...message, data: withWholeNames(withoutGrammar(message.data)) };
    }
    return send.call(this, message, ...more);
  };
})();
