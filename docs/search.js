// The search excludes words after a hyphen, and so would find nothing for an option such as --resize.
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/(^|\s)-+/g, "$1");
}, true);
